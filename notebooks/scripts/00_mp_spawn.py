"""Four ranks in plain PyTorch: let mp.spawn start them and wait for them."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def total(rank, world_size):
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    return tensor.item()


def init_process(rank, world_size, fn, results, backend="gloo"):
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    results.put((rank, fn(rank, world_size)))
    dist.destroy_process_group()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:  # 0: any port that is free
        return server.getsockname()[1]


if __name__ == "__main__":
    world_size = 4
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(init_process, args=(world_size, total, results), nprocs=world_size)
    for rank, value in sorted(results.get() for _ in range(world_size)):
        print(f"rank {rank}: {value}")
