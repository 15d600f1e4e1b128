"""Rows that are dealt out by all_to_all, with gradients, and the attention of Ulysses.

A part of lesson 18.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_kit.lessons._ring_attention import Shards, places


def exchange_rows(rows: torch.Tensor, going: list[int], coming: list[int]) -> torch.Tensor:
    """Send going[r] rows to each rank r, one rank after the other, and receive coming[r]."""
    arrived = rows.new_empty(sum(coming), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), coming, going)
    return arrived


class AllToAll(torch.autograd.Function):
    """`exchange_rows` with a gradient, which travels back the same way."""

    @staticmethod
    def forward(ctx, rows, going, coming):
        ctx.going, ctx.coming = going, coming
        return exchange_rows(rows, going, coming)

    @staticmethod
    def backward(ctx, gradient):
        return exchange_rows(gradient, ctx.coming, ctx.going), None, None


def to_heads(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Give up heads for the whole sequence.

    x: (batch, heads, own length, head width). lengths: the tokens of each rank. Returns
    (batch, heads of this rank, length, head width).
    """
    n, own = dist.get_world_size(), x.shape[2]
    rows = x.unflatten(1, (n, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return AllToAll.apply(rows, [own] * n, lengths).permute(1, 2, 0, 3)


def to_sequence(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Do the reverse of `to_heads`."""
    n, own = dist.get_world_size(), lengths[dist.get_rank()]
    rows = AllToAll.apply(x.permute(2, 0, 1, 3), lengths, [own] * n)
    return rows.unflatten(0, (n, own)).permute(2, 0, 3, 1, 4).flatten(1, 2)


def check_tokens(shards: Shards, causal: bool) -> None:
    """Raise ValueError if a causal mask meets tokens that are not in order."""
    order = [place for shard in shards for chunk in shard for place in chunk]
    if causal and order != sorted(order):
        raise ValueError("causal attention by Ulysses needs the tokens in order: use in_order")


def ulysses(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shards: Shards,
    causal: bool = True,
) -> torch.Tensor:
    """Return this rank's rows of the attention to a sequence that is dealt out in order.

    shards: as `in_order` deals them out. Raises ValueError if the tokens are not in order and
    causal, or if the heads do not divide.

    Source: Jacobs et al., "DeepSpeed Ulysses" (2023), https://arxiv.org/abs/2309.14509.
    """
    heads, n = query.shape[1], dist.get_world_size()
    lengths = [len(places(shard)) for shard in shards]
    check_tokens(shards, causal)
    if heads % n:
        raise ValueError(f"{n} ranks cannot share {heads} heads evenly")
    whole = [to_heads(x, lengths) for x in (query, key, value)]
    return to_sequence(F.scaled_dot_product_attention(*whole, is_causal=causal), lengths)
