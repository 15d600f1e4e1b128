"""GPipe by hand, compared with one process. Needs PyTorch and nothing else."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WIDTH, SEQUENCES = 16, 24


def worker(rank, world_size, m):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)  # the same weights and data on all ranks
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(world_size)]
    x, target = torch.randn(2, SEQUENCES, WIDTH)
    (nn.Sequential(*layers)(x) - target).square().mean().backward()  # one process
    alone = [parameter.grad for parameter in layers[rank].parameters()]
    stage, held = layers[rank], []
    stage.zero_grad()
    for part, wanted in zip(x.chunk(m), target.chunk(m)):
        if rank > 0:
            part = torch.empty_like(part)
            dist.recv(part, src=rank - 1)
            part.requires_grad_()
        y = stage(part)
        if rank < world_size - 1:
            dist.send(y.detach(), dst=rank + 1)
        else:
            y = (y - wanted).square().mean() / m
        held.append((part, y))
    for part, y in held:
        gradient = None
        if rank < world_size - 1:
            gradient = torch.empty_like(y)
            dist.recv(gradient, src=rank + 1)
        y.backward(gradient)
        if rank > 0:
            dist.send(part.grad, dst=rank - 1)
    pairs = zip(stage.parameters(), alone)
    difference = torch.stack([(p.grad - q).abs().max() for p, q in pairs]).max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        equal = difference.item() < 1e-6
        print(f"{world_size} ranks, {m} micro-batches: gradients equal up to 1e-6: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(3, 8), nprocs=3)
