"""Pass numbers round a ring of processes, in plain PyTorch."""

import os
import tempfile

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
    return received


def worker(rank, world_size, folder):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.save(ring(rank, world_size), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 4
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(world_size, folder), nprocs=world_size)
        for rank in range(world_size):
            received = torch.load(f"{folder}/{rank}.pt")
            print(f"rank {rank} received {received.item()} from rank {(rank - 1) % world_size}")
