# Made from notebooks/10_backends.ipynb by `make editions`: edit that, not this.
"""Backends: what each can do, and what it costs."""

import math
import time
from functools import partial
from statistics import fmean, median, pstdev

import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._backends import (
    BITWISE,
    DTYPES,
    EVERYWHERE,
    LIMIT,
    OPERATIONS,
    OPS,
    PLACES,
    attempt,
    here,
    main,
    missing,
    print_table,
    probe,
    probe_here,
    refusals,
    started_by,
)
from ddp_kit.lessons._launch import run_as_script


def accepts(rank, world_size, backend):
    group = dist.new_group(backend=backend)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return f"refused: {error}"
    return "works"


STRINGS = ("gloo", "cpu:gloo", "cuda:gloo", "cpu:gloo,cuda:gloo")


def true_until(rank, world_size, most=20):
    tensor = torch.tensor([True], device=kit.device())
    for count in range(1, most + 1):
        dist.all_reduce(tensor)
        if not tensor.item():
            return count
    return None


def measure(rank, world_size, operation, sizes, dtype=torch.float32, most=15):
    tensors = [
        torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype, device=kit.device())
        for nbytes in sizes
    ]
    samples = [[] for _ in tensors]
    for turn in range(1 + most):
        for tensor, seconds in zip(tensors, samples, strict=True):
            if tensor.nbytes >= 1_000_000 and turn > 5:
                continue
            dist.barrier()
            start = time.perf_counter()
            operation(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return [seconds[1:] for seconds in samples]  # the first round warms up


SIZES = (4, 64, 1_000, 16_000, 256_000, 4_000_000, 64_000_000)  # bytes


def samples(run, operation, sizes, dtype=torch.float32):
    per_rank = run(measure, operation, sizes, dtype)
    rounds = [[max(times) for times in zip(*same_size)] for same_size in zip(*per_rank)]
    return list(zip(sizes, rounds))


def broadcast(tensor):
    dist.broadcast(tensor, src=0)


def there_and_back(tensor):
    rank = dist.get_rank()
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def fit_by_hand(points):
    every_k = [10 ** (i / 50) for i in range(451)]  # bytes: from 1 to 1,000,000,000
    fits = []
    for k in every_k:
        logs = [math.log(seconds / (1 + nbytes / k)) for nbytes, seconds in points]
        fits.append((pstdev(logs), math.exp(fmean(logs)), k))
    _, alpha, k = min(fits)
    return alpha, alpha / k


def direct_and_wrapped(rank, world_size, rounds=300):
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(range(world_size)))
    tensor, medians = torch.zeros(1), []
    native = partial(ranks.Allreduce, MPI.IN_PLACE, tensor.numpy())
    for call in (native, partial(dist.all_reduce, tensor)):
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        medians.append(median(seconds))
    return medians


def lopsided_sum(rank, world_size, dtype):
    large = 2.0 / torch.finfo(dtype).eps
    tensor = torch.ones(world_size, dtype=dtype, device=kit.device())
    tensor[rank] = large
    dist.all_reduce(tensor)
    return (tensor.double() - large).tolist()


def both_send_first(rank, world_size, nbytes):
    mine = torch.full((nbytes // 4,), float(rank), device=kit.device())
    into = torch.empty_like(mine)
    dist.send(mine, 1 - rank)
    dist.recv(into, 1 - rank)
    return into[0].item()


if __name__ == "__main__":
    run_as_script(main)
