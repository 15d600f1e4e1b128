# Made from notebooks/04_ring_allreduce.ipynb by `make editions`: edit that, not this. 4c65717130b9
"""Ring all-reduce: build your own."""

from itertools import product
from time import perf_counter

import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._ring_allreduce import arrivals, chunked_ring, compare, explore, main, watch


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


def measure(rank, world_size, sizes, rounds):
    tensors = {nbytes: torch.zeros(nbytes // 4, device=kit.device()) for nbytes in sizes}
    kept = torch.empty_like(tensors[sizes[-1]])
    ways = {
        "built-in all_reduce": dist.all_reduce,
        "whole ring": whole_ring,
        "chunked ring": chunked_ring,
        "preposted ring": lambda tensor: preposted_ring(tensor, kept[: len(tensor)]),
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


SIZES = (4_000, 40_000, 400_000, 4_000_000, 40_000_000)  # bytes


def samples(run, sizes=SIZES, rounds=None):
    small = [nbytes for nbytes in sizes if nbytes < 10_000_000]
    series = {}
    for some, many in (small, 15), (sizes[len(small) :], 5):
        ranks = list(run(measure, some, rounds or many)) if some else [{}]
        for name in ranks[0]:
            for nbytes in some:
                by_round = zip(*(rank[name][nbytes] for rank in ranks), strict=True)
                series.setdefault(name, []).append((nbytes, list(map(max, by_round))))
    return series


if __name__ == "__main__":
    run_as_script(main)
