# Made from notebooks/04_ring_allreduce.ipynb by `make editions`: edit that, not this.
"""Ring all-reduce: build your own."""

from itertools import product
from time import perf_counter

import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._ring_allreduce import arrivals, compare, explore, main, watch


def neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % n, (rank + 1) % n


def whole_ring(tensor):
    left, right = neighbours()
    passing, arriving = tensor.clone(), torch.empty_like(tensor)
    for _ in range(dist.get_world_size() - 1):
        sending = dist.isend(passing, right)
        dist.recv(arriving, left)
        tensor += arriving
        sending.wait()
        passing, arriving = arriving, passing


def count(rank, world_size, ring, numel):
    ring(torch.zeros(numel, device=kit.device()))


def exchange(going, right, coming, left):
    sending = dist.isend(going, right) if len(going) else None
    if len(coming):
        dist.recv(coming, left)
    if sending:
        sending.wait()


def reduce_chunks(chunks):
    "The first half: chunk (rank + 1) % n is complete at the end."
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = neighbours()
    arriving = torch.empty_like(chunks[0])  # no chunk is longer
    for step in range(n - 1):
        going, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(going, right, arriving[: len(coming)], left)
        coming += arriving[: len(coming)]


def gather_chunks(chunks):
    "The second half: pass on the complete chunks, until all ranks hold all of them."
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = neighbours()
    for step in range(n - 1):
        going, coming = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        exchange(going, right, coming, left)


def chunked_ring(tensor):
    chunks = tensor.view(-1).tensor_split(dist.get_world_size())
    reduce_chunks(chunks)
    gather_chunks(chunks)


def preposted_ring(tensor, scratch=None):
    n, (left, right) = dist.get_world_size(), neighbours()
    scratch = torch.empty_like(tensor) if scratch is None else scratch
    chunks, partial = tensor.view(-1).tensor_split(n), scratch.view(-1).tensor_split(n)
    coming = arrivals(n)
    landing = [(partial if step < n - 1 else chunks)[chunk] for step, chunk in enumerate(coming)]
    receives = [
        dist.irecv(into, left, tag=step) if len(into) else None for step, into in enumerate(landing)
    ]
    sends, going = [], chunks[dist.get_rank()]
    for step, chunk in enumerate(coming):
        if len(going):
            sends.append(dist.isend(going, right, tag=step))
        going = chunks[chunk]
        if receives[step]:
            receives[step].wait()
        if step < n - 1:
            going += landing[step]
    for sending in sends:
        sending.wait()


def break_even(n, alpha, beta):
    "Return the bytes at which both rings take the same time, by their formulas."
    if n == 2:
        return float("inf")
    return n / (n - 2) * alpha / beta


def measure(rank, world_size, sizes, rounds):
    tensors = {nbytes: torch.zeros(nbytes // 4, device=kit.device()) for nbytes in sizes}
    kept = torch.empty_like(tensors[sizes[-1]])
    ways = {
        "whole ring": whole_ring,
        "chunked ring": chunked_ring,
        "preposted ring": lambda tensor: preposted_ring(tensor, kept[: len(tensor)]),
        "built-in all_reduce": dist.all_reduce,
    }
    seconds = {name: {nbytes: [] for nbytes in sizes} for name in ways}
    for turn in range(1 + rounds):
        for nbytes, name in product(sizes[:: 1 if turn % 2 else -1], ways):
            dist.barrier()
            start = perf_counter()
            ways[name](tensors[nbytes])
            if kept.is_cuda:
                torch.cuda.synchronize()
            if turn:
                seconds[name][nbytes].append(perf_counter() - start)
    return seconds


SIZES = (2_000, 20_000, 200_000, 2_000_000, 20_000_000)  # bytes


def samples(run, sizes=SIZES, rounds=25):
    ranks = list(run(measure, sizes, rounds))
    series = {name: [] for name in ranks[0]}
    for name, nbytes in product(series, sizes):
        by_round = zip(*(rank[name][nbytes] for rank in ranks), strict=True)
        series[name].append((nbytes, list(map(max, by_round))))
    return series


def fastest(series):
    return {name: [(N, min(rounds)) for N, rounds in points] for name, points in series.items()}


if __name__ == "__main__":
    run_as_script(main)
