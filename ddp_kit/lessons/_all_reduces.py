"""Three more all_reduces made of sends: a tree, halves that double, and two levels of rings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_kit.lessons.ring_allreduce import exchange


def tree(tensor: torch.Tensor) -> None:
    """Sum a contiguous `tensor` in place: up a binomial tree to rank 0, and down again."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(tensor)
    distances = [2**level for level in range((n - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            dist.recv(arriving, rank + distance)
            tensor += arriving
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            dist.send(tensor, rank + distance)


def halving_doubling(tensor: torch.Tensor) -> None:
    """Sum a contiguous `tensor` in place: swap halves, quarters, eighths, and all the way back.

    Ranks above the largest power of two give their tensor to a partner first, and get the sum
    back at the end.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    core = 2 ** (n.bit_length() - 1)
    arriving = torch.empty_like(tensor).view(-1)
    if rank >= core:
        dist.send(tensor, rank - core)
        dist.recv(tensor, rank - core)
        return
    if rank + core < n:
        dist.recv(arriving, rank + core)
        tensor.view(-1).add_(arriving)
    piece, swaps, distance = tensor.view(-1), [], core // 2
    while distance:
        low, high = piece.tensor_split(2)
        kept, given = (high, low) if rank & distance else (low, high)
        exchange(given, rank ^ distance, arriving[: len(kept)], rank ^ distance)
        kept += arriving[: len(kept)]
        swaps.append((rank ^ distance, kept, given))
        piece, distance = kept, distance // 2
    for partner, kept, given in reversed(swaps):
        exchange(kept, partner, given, partner)
    if rank + core < n:
        dist.send(tensor, rank + core)


def two_level(tensor: torch.Tensor, per_host: int) -> None:
    """Sum a contiguous `tensor` in place: a ring in each host of `per_host` ranks, rings between.

    Consecutive ranks share a host; the world size must be a multiple of `per_host`.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    host = rank - rank % per_host
    inside, between = range(host, host + per_host), range(rank % per_host, n, per_host)
    chunks = tensor.view(-1).tensor_split(per_host)
    mine = reduce_scatter(chunks, inside)
    pieces = mine.tensor_split(len(between))
    reduce_scatter(pieces, between)
    all_gather(pieces, between)
    all_gather(chunks, inside)


def reduce_scatter(chunks: Sequence[torch.Tensor], ring: Sequence[int]) -> torch.Tensor:
    """Sum up chunks, one a rank of the ring, in n-1 steps; return the one that is complete here."""
    me, n = ring.index(dist.get_rank()), len(ring)
    arriving = torch.empty_like(chunks[0])  # the first chunk is never smaller than another
    for step in range(n - 1):
        going, coming = chunks[(me - step) % n], chunks[(me - step - 1) % n]
        exchange(going, ring[(me + 1) % n], arriving[: len(coming)], ring[(me - 1) % n])
        coming += arriving[: len(coming)]
    return chunks[(me + 1) % n]


def all_gather(chunks: Sequence[torch.Tensor], ring: Sequence[int]) -> None:
    """Hand the complete chunks round, in n-1 steps."""
    me, n = ring.index(dist.get_rank()), len(ring)
    for step in range(n - 1):
        going, coming = chunks[(me - step + 1) % n], chunks[(me - step) % n]
        exchange(going, ring[(me + 1) % n], coming, ring[(me - 1) % n])
