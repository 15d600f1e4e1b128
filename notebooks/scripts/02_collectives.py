"""Mean and standard deviation of numbers that are spread over processes, in plain PyTorch."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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


def worker(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    found = torch.stack(mean_and_std(own_numbers(rank)))
    if rank == 0:
        whole = torch.cat([own_numbers(r) for r in range(world_size)])
        expected = torch.stack([whole.mean(), whole.std(correction=0)])
        print("four processes: mean {:.9f}, standard deviation {:.9f}".format(*found))
        print("one process:    mean {:.9f}, standard deviation {:.9f}".format(*expected))
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 4
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(world_size,), nprocs=world_size)
