"""Pass numbers round a ring of processes, in plain PyTorch."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def ring(rank, world_size):
    tensor = torch.tensor([10 * rank])
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, dst=(rank + 1) % world_size)
    receiving = dist.irecv(received, src=(rank - 1) % world_size)
    sending.wait()
    receiving.wait()
    return received.item()


def worker(rank, world_size, results):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    results.put((rank, ring(rank, world_size)))
    dist.destroy_process_group()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:  # 0: any port that is free
        return server.getsockname()[1]


if __name__ == "__main__":
    world_size = 4
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, args=(world_size, results), nprocs=world_size)
    for rank, number in sorted(results.get() for _ in range(world_size)):
        print(f"rank {rank} received {number} from rank {(rank - 1) % world_size}")
