"""The whole ring beside dist.all_reduce. Needs PyTorch and nothing else."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def whole_ring(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    passing, arriving = tensor.clone(), torch.empty_like(tensor)
    nbytes = 0
    for _ in range(n - 1):
        sending = dist.isend(passing, right)
        dist.recv(arriving, left)
        tensor += arriving
        sending.wait()
        nbytes += passing.nbytes
        passing, arriving = arriving, passing
    return nbytes


def worker(rank, world_size):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    ours = 1.0 / torch.arange(1 + rank, 100_001 + rank)
    theirs, size = ours.clone(), ours.nbytes
    nbytes = whole_ring(ours)
    dist.all_reduce(theirs)
    difference = (ours - theirs).abs().max().item()
    if rank == 0:
        print(f"{world_size} ranks: the sums differ by at most {difference:.0g};", end=" ")
        print(f"rank 0 sent {nbytes:,} bytes, (n-1)*N is {(world_size - 1) * size:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    for world_size in (2, 3, 4):
        mp.spawn(worker, args=(world_size,), nprocs=world_size)
