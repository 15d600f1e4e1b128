"""Ring attention: each rank keeps its queries, and keys and values travel round the ring.

A part of lesson 18. Queries, keys and values have the shape (batch, heads, length, head width).
`shards[rank]` lists the chunks of the sequence that a rank holds: ranges of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_kit.lessons.ring_allreduce import neighbours

Shards = list[list[range]]


class OnlineSoftmax:
    """Attention of some queries to keys that arrive block by block.

    For each query, keeps the largest score so far, the sum of the weights, and the weighted sum of
    the values; both sums are relative to that score. Source: Milakov and Gimelshein, "Online
    normalizer calculation for softmax" (2018), https://arxiv.org/abs/1805.02867.
    """

    def __init__(self, query: torch.Tensor) -> None:
        self.maximum = query.new_full((*query.shape[:-1], 1), -math.inf)
        self.total = torch.zeros_like(self.maximum)
        self.weighted = torch.zeros_like(query)

    def add(self, scores: torch.Tensor, value: torch.Tensor, rows: slice = slice(None)) -> None:
        """Take in the scores of some rows, the queries, for a block of keys, and its values."""
        kept = self.maximum, self.total, self.weighted
        maximum, total, weighted = (each[..., rows, :] for each in kept)
        larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        rescale, weights = torch.exp(maximum - larger), torch.exp(scores - larger)
        total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(rescale).add_(weights @ value)
        maximum.copy_(larger)

    def output(self) -> torch.Tensor:
        """Return the attention to all blocks so far."""
        return self.weighted / self.total

    def logsumexp(self) -> torch.Tensor:
        """Return the logarithm of the sum of exp(score): exp(score - it) is the softmax."""
        return self.maximum + self.total.log()


def cut(length: int, parts: int) -> list[range]:
    """Cut the positions 0 to length-1 into `parts` chunks, as even as possible.

    Raises ValueError if there are no parts, or fewer positions than parts.
    """
    if not 1 <= parts <= length:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {parts} chunks")
    ends = [length * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def in_order(length: int, n: int) -> Shards:
    """Deal a sequence out to n ranks, one chunk each."""
    return [[chunk] for chunk in cut(length, n)]


def zig_zag(length: int, n: int) -> Shards:
    """Deal a sequence out to n ranks in 2n chunks: rank r gets the r-th from either end."""
    chunks = cut(length, 2 * n)
    return [[chunks[rank], chunks[2 * n - 1 - rank]] for rank in range(n)]


def places(shard: list[range]) -> torch.Tensor:
    """Return the positions of a rank's tokens, in the order in which it holds them."""
    return torch.tensor([place for chunk in shard for place in chunk])


def slices(shard: list[range]) -> Iterator[tuple[slice, range]]:
    """Yield where each chunk is among the rank's rows, and the chunk."""
    start = 0
    for chunk in shard:
        yield slice(start, start + len(chunk)), chunk
        start += len(chunk)


def needed(
    queries: list[range], keys: list[range], causal: bool
) -> Iterator[tuple[slice, slice, bool]]:
    """Yield the pairs of chunks to compute: rows of the queries, rows of the keys, and a flag.

    The flag says that the chunks are the same one, and later keys have to be masked. Keys of a
    later chunk are left out.
    """
    for rows, mine in slices(queries):
        for columns, theirs in slices(keys):
            if not causal or theirs.start <= mine.start:
                yield rows, columns, causal and theirs == mine


def scores(query: torch.Tensor, key: torch.Tensor, masked: bool) -> torch.Tensor:
    """Return the scores of all pairs; masked: -inf where the key comes after the query."""
    products = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if masked:
        later = torch.ones_like(products, dtype=torch.bool).triu(1)
        products = products.masked_fill(later, -math.inf)
    return products


def start_exchange(going: torch.Tensor, coming: torch.Tensor) -> list[dist.Work]:
    """Start to send one tensor to the right and to receive another from the left."""
    if dist.get_world_size() == 1:
        coming.copy_(going)
        return []
    left, right = neighbours()
    return [dist.isend(going, right), dist.irecv(coming, left)]


class Message(Timer):
    """A function that is called after some seconds, in a thread, for which one can wait."""

    wait = Timer.join


def slow_exchange(going: torch.Tensor, coming: torch.Tensor) -> list[Any]:
    """Do what `start_exchange` does on several ranks, with messages that travel for 40 ms."""
    left, right = neighbours()
    message = Message(0.04, dist.send, (going, right))
    message.start()
    return [dist.irecv(coming, left), message]


def wait_for(works: Sequence[Any]) -> None:
    """Wait for all of them."""
    for work in works:
        work.wait()


def room_for(block: torch.Tensor, shard: list[range]) -> torch.Tensor:
    """Return an empty tensor for the block of a rank that holds other chunks."""
    return block.new_empty(*block.shape[:-2], sum(map(len, shard)), block.shape[-1])


def travel(
    block: torch.Tensor,
    shards: Shards,
    start: Callable[[torch.Tensor, torch.Tensor], Sequence[Any]] = start_exchange,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each rank's block and its owner, the own one first.

    While the caller computes with a block, it goes to the right, and the next one comes.
    start: starts an exchange, as `start_exchange` does, and returns what to wait for.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n):
        works, coming = [], block
        if step < n - 1:
            coming = room_for(block, shards[(rank - step - 1) % n])
            works = start(block, coming)
        yield (rank - step) % n, block
        wait_for(works)
        block = coming


def attend_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shards: Shards,
    causal: bool,
    note: Callable[[int, slice, slice, int], None] = lambda *_: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of the attention, and the logsumexp of their scores.

    note: called for each pair of chunks that is computed, with the owner of the keys, the rows of
        the queries and of the keys, and the number of pairs of a query and a key.
    """
    mine, softmax = shards[dist.get_rank()], OnlineSoftmax(query)
    for owner, (keys, values) in travel(torch.stack([key, value]), shards):
        for rows, columns, masked in needed(mine, shards[owner], causal):
            block = scores(query[..., rows, :], keys[..., columns, :], masked)
            softmax.add(block, values[..., columns, :], rows)
            note(owner, rows, columns, block.shape[-2] * block.shape[-1])
    return softmax.output(), softmax.logsumexp()


def attend_gathered(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shards: Shards, causal: bool
) -> torch.Tensor:
    """Return this rank's rows of the attention, from an all_gather of all keys and values.

    The shards have equal lengths. It has no gradient.
    """
    block = torch.stack([key, value])
    blocks = [room_for(block, shard) for shard in shards]
    dist.all_gather(blocks, block)
    keys, values = torch.cat(blocks, -2)
    positions = [places(shard).to(query.device) for shard in shards]
    seen = torch.cat(positions) <= positions[dist.get_rank()][:, None] if causal else None
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)


class BlockGradients:
    """The gradients of attention, one pair of chunks at a time, from saved logsumexps."""

    def __init__(self, query, output, logsumexp, gradient) -> None:
        self.query, self.logsumexp, self.gradient = query, logsumexp, gradient
        self.dot = (gradient * output).sum(-1, keepdim=True)
        self.d_query = torch.zeros_like(query)

    def add(self, block, d_block, rows: slice, columns: slice, masked: bool) -> None:
        """Add to the gradients of the queries, and of a block of keys and values."""
        kept = self.query, self.logsumexp, self.gradient, self.dot, self.d_query
        query, logsumexp, gradient, dot, d_query = (each[..., rows, :] for each in kept)
        (key, value), (d_key, d_value) = block[..., columns, :], d_block[..., columns, :]
        weights = torch.exp(scores(query, key, masked) - logsumexp)
        d_value += weights.transpose(-2, -1) @ gradient
        d_scores = weights * (gradient @ value.transpose(-2, -1) - dot)
        d_scores /= math.sqrt(query.shape[-1])
        d_query += d_scores @ key
        d_key += d_scores.transpose(-2, -1) @ query


def attend_backward(
    block: torch.Tensor, gradients: BlockGradients, shards: Shards, causal: bool
) -> torch.Tensor:
    """Return the gradient of this rank's keys and values, which has gone round with them."""
    rank, n = dist.get_rank(), dist.get_world_size()
    works, arriving = [], None
    for owner, visitor in travel(block, shards):
        d_visitor = torch.zeros_like(visitor)
        for rows, columns, masked in needed(shards[rank], shards[owner], causal):
            gradients.add(visitor, d_visitor, rows, columns, masked)
        wait_for(works)
        if arriving is not None:
            d_visitor += arriving
        arriving = room_for(block, shards[(owner - 1) % n])
        d_sent = d_visitor  # must live until it has arrived
        works = start_exchange(d_sent, arriving)
    wait_for(works)
    return arriving


class RingAttention(torch.autograd.Function):
    """Attention to a sequence of which each rank holds a shard.

    Sources: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context"
    (2023), https://arxiv.org/abs/2310.01889; for the backward Dao et al., "FlashAttention" (2022),
    https://arxiv.org/abs/2205.14135.
    """

    @staticmethod
    def forward(ctx, query, key, value, shards, causal):
        output, logsumexp = attend_forward(query, key, value, shards, causal)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.shards, ctx.causal = shards, causal
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, logsumexp = ctx.saved_tensors
        gradients = BlockGradients(query, output, logsumexp, gradient)
        block = torch.stack([key, value])
        d_key, d_value = attend_backward(block, gradients, ctx.shards, ctx.causal)
        return gradients.d_query, d_key, d_value, None, None


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shards: Shards,
    causal: bool = True,
) -> torch.Tensor:
    """Return this rank's rows of the attention to the whole sequence; differentiable."""
    return RingAttention.apply(query, key, value, shards, causal)
