"""Mean and standard deviation of numbers of which no process has all. Needs PyTorch only."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 4


def own_numbers(rank):
    """Return this rank's numbers: 1000 on rank 0, 2000 on rank 1, and so on."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1000 * (rank + 1), dtype=torch.float64, generator=generator) + rank


def mean_and_std(mine):
    """Return the mean and the standard deviation of the numbers of all ranks."""
    sums = torch.stack([torch.tensor(len(mine)).double(), mine.sum()])
    dist.all_reduce(sums)
    count, total = sums
    mean = total / count
    squares = ((mine - mean) ** 2).sum()
    dist.all_reduce(squares)
    return mean, (squares / count).sqrt()


def worker(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    found = torch.stack(mean_and_std(own_numbers(rank)))
    if rank == 0:
        whole = torch.cat([own_numbers(r) for r in range(WORLD_SIZE)])
        expected = torch.stack([whole.mean(), whole.std(correction=0)])
        print("four processes: mean {:.9f}, standard deviation {:.9f}".format(*found))
        print("one process:    mean {:.9f}, standard deviation {:.9f}".format(*expected))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(port,), nprocs=WORLD_SIZE)
