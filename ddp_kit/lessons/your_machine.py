# Made from notebooks/05_your_machine.ipynb by `make editions`: edit that, not this.
"""Your machine: what is here, and which rank am I?"""

import argparse
import os
from time import perf_counter

import psutil
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._your_machine import main, side_by_side


def megabytes(rank, world_size):
    used = psutil.Process().memory_full_info()
    return f"resident {used.rss / 1e6:.0f} MB, unique {used.uss / 1e6:.0f} MB"


def multiply(rank, world_size, threads):
    torch.set_num_threads(threads)
    matrix = torch.rand(200, 200)
    torch.relu(matrix @ matrix)  # the first time takes longer
    dist.barrier()
    start = perf_counter()
    for _ in range(200):
        torch.relu(matrix @ matrix)
    return perf_counter() - start


def synchronize():
    package = "torch has no distributed package"
    group, others = "there is no process group", "the world is one rank"
    if not dist.is_available():
        return package
    if not dist.is_initialized():
        return group
    if dist.get_world_size() == 1:
        return others
    dist.barrier()
    return "all ranks are here"


def everywhere(rank, world_size):
    return synchronize()


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def who_am_i(rank, world_size):
    numbers = {name: int(os.environ[name]) for name in NAMES}
    numbers["get_rank()"] = dist.get_rank()
    numbers["get_world_size()"] = dist.get_world_size()
    return numbers


def introduce():
    rank, local_rank, world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    total = torch.tensor([rank], device=kit.device())
    dist.all_reduce(total)
    return f"rank {rank} of {world_size}, local rank {local_rank}, sum of all ranks {total.item()}"


def local_rank_of(arguments, environ):
    parser = argparse.ArgumentParser()
    default = int(environ.get("LOCAL_RANK", 0))
    parser.add_argument("--local-rank", "--local_rank", type=int, default=default)
    known, _ = parser.parse_known_args(arguments)
    return known.local_rank


if __name__ == "__main__":
    run_as_script(main)
