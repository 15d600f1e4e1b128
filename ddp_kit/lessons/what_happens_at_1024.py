# Made from notebooks/12_what_happens_at_1024.ipynb by `make editions`: edit that, not this.
"""What happens at 1,024: plan past what you can run."""

from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit import model
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._what_happens_at_1024 import (
    all_gather,
    halving_doubling,
    main,
    measure,
    reduce_scatter,
    replay,
)
from ddp_kit.lessons.ring_allreduce import chunked_ring, exchange, whole_ring


def tree(tensor):
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


def swap_halves(piece, rank, core):
    arriving, swaps, distance = torch.empty_like(piece), [], core // 2
    while distance:
        low, high = piece.tensor_split(2)
        kept, given = (high, low) if rank & distance else (low, high)
        exchange(given, rank ^ distance, arriving[: len(kept)], rank ^ distance)
        kept += arriving[: len(kept)]
        swaps.append((rank ^ distance, kept, given))
        piece, distance = kept, distance // 2
    for partner, kept, given in reversed(swaps):
        exchange(kept, partner, given, partner)


def differences(rank, world_size):
    builtin = torch.arange(1001.0, device=kit.device()) / (rank + 1)
    by_tree, by_halves = builtin.clone(), builtin.clone()
    tree(by_tree), swap_halves(by_halves, rank, world_size), dist.all_reduce(builtin)
    return [(builtin - other).abs().max().item() for other in (by_tree, by_halves)]


SENT = {  # what sums a tensor on real ranks, and its formula
    "naive ring": (whole_ring, model.naive_ring),
    "chunked ring": (chunked_ring, model.chunked_ring),
    "tree": (tree, model.tree),
    "halving-doubling": (halving_doubling, model.halving_doubling),
}


# gloo's own all_reduce is a chunked ring, too
ALL_REDUCES = SENT | {"built-in": (dist.all_reduce, model.chunked_ring)}


def two_level(tensor, per_host):
    rank, n = dist.get_rank(), dist.get_world_size()
    host = rank - rank % per_host
    inside, between = range(host, host + per_host), range(rank % per_host, n, per_host)
    chunks = tensor.view(-1).tensor_split(per_host)
    mine = reduce_scatter(chunks, inside)
    pieces = mine.tensor_split(len(between))
    reduce_scatter(pieces, between)
    all_gather(pieces, between)
    all_gather(chunks, inside)


NETWORKS = {
    "ResNet-50": (25.6e6, 0.18),
    "Inception V3": (23.9e6, 64 / 142),
    "VGG-16": (138.4e6, 64 / 154),
}  # parameters, seconds of a step


def expect(network, per_host, gbits, cap, relative_to, n, ordered=None):
    parameters, seconds = NETWORKS[network]
    buckets, ready = ordered or (model.buckets(4 * parameters, cap), None)
    cost = partial(
        model.two_level,
        per_host=per_host,
        inside=model.Link(10e-6, 1 / 10e9),
        between=model.Link(20e-6, 8 / (gbits * 1e9)),
    )
    first, last = (
        model.ddp_step(k, buckets, seconds / 3, seconds * 2 / 3, cost, ready)
        for k in (relative_to, n)
    )
    return first / last


def vgg_16():  # parameters and multiplications of each layer, from the first to the last
    layers, inputs, side = [], 3, 224
    for many, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(many):
            weights = 9 * inputs * width
            layers.append((weights + width, weights * side**2))
            inputs = width
        side //= 2  # a pooling layer
    for inputs, outputs in ((512 * side**2, 4096), (4096, 4096), (4096, 1000)):
        layers.append((inputs * outputs + outputs, inputs * outputs))
    return layers


def in_order(layers, cap):
    gradients, work = zip(*((4 * count, work) for count, work in reversed(layers)))
    buckets = model.buckets(gradients, cap)
    done = dict(zip(accumulate(gradients), accumulate(work)))
    return buckets, [done[nbytes] / sum(work) for nbytes in accumulate(buckets)]


if __name__ == "__main__":
    run_as_script(main)
