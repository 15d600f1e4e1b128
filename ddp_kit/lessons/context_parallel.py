# Made from notebooks/18_context_parallel.ipynb by `make editions`: edit that, not this.
"""Context parallelism: one sequence on many ranks."""

import math
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ddp_kit as kit
from ddp_kit.lessons._context_parallel import (
    WIDTH,
    all_scores,
    attend_alone,
    check_ulysses,
    example,
    learn,
    main,
    pairs_of,
    put_together,
    ring_bytes,
    room_for,
    sent,
    slices,
    slow_exchange,
    ulysses_bytes,
    wait_for,
    waited_for,
    watch_memory,
)
from ddp_kit.lessons._gpt import Config, batches, make_gpt
from ddp_kit.lessons._launch import brief, run_as_script
from ddp_kit.lessons.ring_allreduce import neighbours


class OnlineSoftmax:
    def __init__(self, query):
        self.maximum = query.new_full((*query.shape[:-1], 1), -math.inf)
        self.total, self.weighted = torch.zeros_like(self.maximum), torch.zeros_like(query)

    def add(self, scores, value, rows=slice(None)):
        kept = self.maximum, self.total, self.weighted
        maximum, total, weighted = (each[..., rows, :] for each in kept)
        larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        rescale, weights = torch.exp(maximum - larger), torch.exp(scores - larger)
        total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(rescale).add_(weights @ value)
        maximum.copy_(larger)

    def output(self):
        return self.weighted / self.total

    def logsumexp(self):
        return self.maximum + self.total.log()


def repeat(key, query):
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def scores(query, key, masked):
    products = query @ key.mT / math.sqrt(query.shape[-1])
    later = torch.ones_like(products, dtype=torch.bool).triu(1)
    return products.masked_fill(later, -math.inf) if masked else products


def cut(length, parts):
    if not 1 <= parts <= length:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {parts} chunks")
    ends = [length * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def in_order(length, n):
    return [[chunk] for chunk in cut(length, n)]


def places(shard):
    return torch.tensor([place for chunk in shard for place in chunk])


def start_exchange(going, coming):
    left, right = neighbours()
    if left == right == dist.get_rank():
        coming.copy_(going)
        return []
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, going, right), dist.P2POp(dist.irecv, coming, left)]
    )


def travel(block, shards, start=start_exchange):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n):
        works, coming = [], block
        if step < n - 1:
            coming = room_for(block, shards[(rank - step - 1) % n])
            works = start(block, coming)
        yield (rank - step) % n, block
        wait_for(works)
        block = coming


def needed(queries, keys, causal):
    for rows, mine in slices(queries):
        for columns, theirs in slices(keys):
            if causal and theirs.start > mine.start:
                continue
            yield rows, columns, causal and theirs == mine


def attend_forward(query, key, value, shards, causal, note=lambda *_: None):
    mine, softmax = shards[dist.get_rank()], OnlineSoftmax(query)
    for owner, block in travel(torch.stack([key, value]), shards):
        keys, values = (repeat(each, query) for each in block)
        for rows, columns, masked in needed(mine, shards[owner], causal):
            block = scores(query[..., rows, :], keys[..., columns, :], masked)
            softmax.add(block, values[..., columns, :], rows)
            note(owner, rows, columns, block.shape[-2] * block.shape[-1])
    return softmax.output(), softmax.logsumexp()


def rows_of(rank, world_size, layout, attend, causal, length, backward=True):
    shards = layout(length, world_size)
    own = places(shards[rank]).to(kit.device())
    *inputs, gradient = (x[:, :, own] for x in example(length, 2 * world_size, world_size))
    output = attend(*(x.requires_grad_() for x in inputs), shards, causal)
    if backward:
        output.backward(gradient)
    return [output.detach(), *(x.grad for x in inputs)]


def ring_forward(*inputs):
    return attend_forward(*inputs)[0]


class BlockGradients:
    def __init__(self, query, output, logsumexp, gradient):
        dot = (gradient * output).sum(-1, keepdim=True)
        self.d_query = torch.zeros_like(query)
        self.kept = query, logsumexp, gradient, dot, self.d_query

    def add(self, block, d_block, rows, columns, masked):
        query, logsumexp, gradient, dot, d_query = (each[..., rows, :] for each in self.kept)
        key, value = (repeat(each[..., columns, :], query) for each in block)
        weights = torch.exp(scores(query, key, masked) - logsumexp)
        d_scores = weights * (gradient @ value.mT - dot) / math.sqrt(query.shape[-1])
        d_query += d_scores @ key
        for whole, part in zip(d_block, (d_scores.mT @ query, weights.mT @ gradient), strict=True):
            whole[..., columns, :] += part.unflatten(1, (whole.shape[1], -1)).sum(2)


def attend_backward(block, gradients, shards, causal):
    rank, n = dist.get_rank(), dist.get_world_size()
    works, arriving = [], None
    for owner, held in travel(block, shards):
        d_held = torch.zeros_like(held)
        for rows, columns, masked in needed(shards[rank], shards[owner], causal):
            gradients.add(held, d_held, rows, columns, masked)
        wait_for(works)
        if arriving is not None:
            d_held += arriving
        arriving = room_for(block, shards[(owner - 1) % n])
        d_sent = d_held  # must live until it has arrived
        works = start_exchange(d_sent, arriving)
    wait_for(works)
    return arriving


class RingAttention(torch.autograd.Function):
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


def ring_attention(query, key, value, shards, causal=True):
    return RingAttention.apply(query, key, value, shards, causal)


def check(layout, attend, length=19):
    for n, causal in ((3, True), (3, False), (4, True), (4, False)):
        parts = kit.run(rows_of, layout, attend, causal, length, world_size=n)
        whole = [put_together(rows, layout(length, n)) for rows in zip(*parts)]
        expected = [x.cpu() for x in attend_alone(n, causal, length)]
        print(f"{n} ranks, causal {causal!s:5}:", brief(kit.compare(whole, expected)))


def zig_zag(length, n):
    chunks = cut(length, 2 * n)
    return [[chunks[rank], chunks[2 * n - 1 - rank]] for rank in range(n)]


def attend_gathered(query, key, value, shards, causal):
    block = torch.stack([key, value])
    blocks = [room_for(block, shard) for shard in shards]
    dist.all_gather(blocks, block)
    keys, values = torch.cat(blocks, -2)
    positions = [places(shard).to(query.device) for shard in shards]
    seen = torch.cat(positions) <= positions[dist.get_rank()][:, None] if causal else None
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)


def exchange_rows(rows, going, coming, group=None):
    arrived = rows.new_empty(sum(coming), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), coming, going, group=group)
    return arrived


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, going, coming, group=None):
        ctx.splits, ctx.group = (going, coming), group
        return exchange_rows(rows, going, coming, group)

    @staticmethod
    def backward(ctx, gradient):
        going, coming = ctx.splits
        return exchange_rows(gradient, coming, going, ctx.group), None, None, None


def to_heads(x, lengths):
    n, own = dist.get_world_size(), x.shape[2]
    rows = x.unflatten(1, (n, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return AllToAll.apply(rows, [own] * n, lengths).permute(1, 2, 0, 3)


def to_sequence(x, lengths):
    n, own = dist.get_world_size(), lengths[dist.get_rank()]
    rows = AllToAll.apply(x.permute(2, 0, 1, 3), lengths, [own] * n)
    return rows.unflatten(0, (n, own)).permute(2, 0, 3, 1, 4).flatten(1, 2)


def ulysses(query, key, value, shards, causal=True):
    check_ulysses(query, shards, causal)
    lengths = [len(places(shard)) for shard in shards]
    whole = [to_heads(x, lengths) for x in (query, key, value)]
    output = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    return to_sequence(output, lengths)


LAYOUTS = {"ring": in_order, "zig-zag": zig_zag, "Ulysses": in_order}


def spread(model, attend):
    for block in model.blocks:
        block.attention.attend = attend


def loss_of_part(model, batch, own):
    inputs, targets = (both[:, own] for both in batch)
    logits = model(inputs, own).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / batch[0].numel()


def train(rank, world_size, way="zig-zag", context=2048, steps=3):
    model = make_gpt(Config(context=context))
    shards = LAYOUTS[way](context, world_size)
    spread(model, partial(ulysses if way == "Ulysses" else ring_attention, shards=shards))
    own = places(shards[rank]).to(kit.device())
    return learn(model, partial(loss_of_part, own=own), batches(1, steps, context))


if __name__ == "__main__":
    run_as_script(main)
