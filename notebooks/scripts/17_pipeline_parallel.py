"""GPipe by hand, compared with one process. Needs PyTorch and nothing else."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WIDTH, SEQUENCES = 16, 24


def stages(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def worker(rank, world_size, m):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    alone = stages(world_size)
    stage = stages(world_size)[rank]
    x, target = torch.randn(2, SEQUENCES, WIDTH)  # the same on all ranks
    held = []
    for i, (part, wanted) in enumerate(zip(x.chunk(m), target.chunk(m))):
        if rank > 0:
            part = torch.empty_like(part)
            dist.recv(part, src=rank - 1, tag=i)
            part.requires_grad_()
        y = stage(part)
        if rank < world_size - 1:
            dist.send(y.detach(), dst=rank + 1, tag=i)
        else:
            y = (y - wanted).square().mean() / m
        held.append((part, y))
    for i, (part, y) in enumerate(held):
        gradient = None
        if rank < world_size - 1:
            gradient = torch.empty_like(y)
            dist.recv(gradient, src=rank + 1, tag=i)
        y.backward(gradient)
        if rank > 0:
            dist.send(part.grad, dst=rank - 1, tag=i)
    (nn.Sequential(*alone)(x) - target).square().mean().backward()
    pairs = zip(stage.parameters(), alone[rank].parameters())
    difference = torch.stack([(p.grad - q.grad).abs().max() for p, q in pairs]).max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        equal = difference.item() < 1e-6
        print(f"{world_size} ranks, {m} micro-batches: gradients equal up to 1e-6: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    world_size, m = 3, 8
    assert SEQUENCES % m == 0, f"m must divide the {SEQUENCES} sequences, got {m}"
    mp.spawn(worker, args=(world_size, m), nprocs=world_size)
