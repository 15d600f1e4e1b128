"""Four ranks in plain PyTorch: mp.spawn starts them and waits for them."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def total(rank, world_size):
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    return tensor.item()


def init_process(rank, world_size, fn, folder, backend="gloo"):
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    torch.save(fn(rank, world_size), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 4
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(init_process, args=(world_size, total, folder), nprocs=world_size)
        for rank in range(world_size):
            value = torch.load(f"{folder}/{rank}.pt")
            print(f"rank {rank}: {value}")
