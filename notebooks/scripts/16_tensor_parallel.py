"""Two layers cut as in Megatron-LM, compared with one process. It needs PyTorch alone."""

import copy
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def summed(tensor):
    dist.all_reduce(total := tensor.clone())
    return total


class CopyToRegion(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x)
    backward = staticmethod(lambda ctx, gradient: summed(gradient))


class ReduceFromRegion(torch.autograd.Function):
    forward = staticmethod(lambda ctx, summand: summed(summand))
    backward = staticmethod(lambda ctx, gradient: gradient)


def worker(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    enter, up, _, down = mine = copy.deepcopy(alone)
    for layer, name, dim in ((up, "weight", 0), (up, "bias", 0), (down, "weight", 1)):
        part = getattr(layer, name).detach().chunk(world_size, dim)[rank]
        setattr(layer, name, nn.Parameter(part.clone()))

    def forward(x):
        hidden = torch.tanh(up(CopyToRegion.apply(enter(x))))
        return ReduceFromRegion.apply(hidden @ down.weight.T) + down.bias

    adams = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (alone, mine)]
    for _ in range(5):
        x = torch.randn(8, 16)  # the same on all ranks
        losses = [model(x).square().mean() for model in (alone, forward)]
        for loss, adam in zip(losses, adams):
            adam.zero_grad()
            loss.backward()
            adam.step()
    if rank == 0:
        weight = abs(alone[1].weight.chunk(world_size)[0] - up.weight).max()
        print(f"{world_size} ranks, {len(up.weight)} of {len(alone[1].weight)} rows each:", end=" ")
        print(f"loss off by {abs(losses[0] - losses[1]):.5f}, weight by {weight:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    for world_size in (2, 4):
        mp.spawn(worker, args=(world_size,), nprocs=world_size)
