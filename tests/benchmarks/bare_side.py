"""Plain PyTorch's side: mp.spawn, init_process_group and all_reduce, and nothing around them."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from side import seconds, serve

WORLD_SIZE = 4


def join_group(rank, folder, world_size):
    """Join a group through a file, over loopback, with one thread per rank, as the kit does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)


def all_reduce():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def first_result(rank, folder, pipes):
    join_group(rank, folder, len(pipes))
    pipes[rank].send(all_reduce())
    dist.destroy_process_group()


def only_import(rank, folder, pipes):
    pipes[rank].send(None)  # torch came with this module


def serve_calls(rank, folder, pipes):
    join_group(rank, folder, len(pipes))
    while pipes[rank].recv():
        pipes[rank].send(all_reduce())
    dist.destroy_process_group()


@contextmanager
def spawned(worker, world_size=WORLD_SIZE):
    """Start `worker` on some processes and return the parent's ends of their pipes."""
    ours, theirs = zip(*(Pipe() for _ in range(world_size)), strict=True)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(worker, (folder, theirs), nprocs=world_size, join=False)
        yield ours
        while not context.join():
            pass


def once(worker):
    """Time from nothing until the last of four processes has sent its result."""
    yield "ready"
    began = time.perf_counter()
    with spawned(worker) as pipes:
        answers = [pipe.recv() for pipe in pipes]
        took = time.perf_counter() - began
    assert answers in ([4.0] * WORLD_SIZE, [None] * WORLD_SIZE)
    yield [took]


def call(pipes):
    for pipe in pipes:
        pipe.send(True)
    assert [pipe.recv() for pipe in pipes] == [len(pipes)] * len(pipes)


def warm():
    """Time the least that a warm call can cost: a word to each process, all_reduce, a word back."""
    with spawned(serve_calls) as pipes:
        call(pipes)
        yield "ready"
        try:
            while True:
                yield [seconds(call, pipes) for _ in range(20)]
        finally:
            for pipe in pipes:
                pipe.send(False)


def growth(world_size):
    """Start some number of processes; the first such call, the median of 50; in seconds."""
    yield "ready"
    began = time.perf_counter()
    with spawned(serve_calls, world_size) as pipes:
        call(pipes)
        start = time.perf_counter() - began
        found = statistics.median(seconds(call, pipes) for _ in range(50))
        for pipe in pipes:
            pipe.send(False)
    yield {"bare_start": start, "floor": found}


if __name__ == "__main__":
    serve(
        {
            "cold": lambda: once(first_result),
            "imports": lambda: once(only_import),
            "warm": warm,
            **{f"growth {n}": partial(growth, n) for n in (2, 4, 8, 16, 32, 64)},
        }
    )
