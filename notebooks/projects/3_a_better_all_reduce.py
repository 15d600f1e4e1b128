"""Compare an all_reduce with gloo's: torchrun --standalone --nproc-per-node 4 FILE.py [REPORT]

Your project is to make `all_reduce` better. The rest measures it, and stays as it is.
"""

import json
import sys
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

MIX = {1_000: 40, 16_000: 20, 250_000: 8, 4_000_000: 2}  # bytes of a tensor, and how many of them
PAIRS = 15


def all_reduce(tensor):
    """Add up a tensor over all ranks, in place on each: rank 0 adds, and sends the sum to all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    arriving = torch.empty_like(tensor)
    for other in range(1, world_size):
        dist.recv(arriving, other)
        tensor += arriving
    for other in range(1, world_size):
        dist.send(tensor, other)


def one_mix(way):
    """Return the seconds of all tensors of each size. The tensors are zero, so no sum overflows."""
    seconds = {}
    for nbytes, many in MIX.items():
        tensor = torch.zeros(nbytes // 4)
        dist.barrier()
        begin = perf_counter()
        for _ in range(many):
            way(tensor)
        dist.barrier()  # the slowest rank counts
        seconds[nbytes] = perf_counter() - begin
    return seconds


def measure():
    """Return the seconds of both ways, pair by pair; in every other pair, gloo comes last."""
    ways = {"gloo": dist.all_reduce, "mine": all_reduce}
    found = {name: [] for name in ways}
    for turn in range(PAIRS + 1):  # the first one opens the connections, and does not count
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            found[name].append(one_mix(ways[name]))
    return {name: pairs[1:] for name, pairs in found.items()}


def main(report):
    """Measure on all ranks, and write the report of rank 0."""
    torch.set_num_threads(1)  # the ranks share the cores of this machine
    dist.init_process_group("gloo")
    found = measure()
    if dist.get_rank() == 0:
        Path(report).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["report.json"])
