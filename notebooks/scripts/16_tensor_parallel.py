"""Two layers cut as in Megatron-LM, compared with one process. It needs PyTorch alone."""

import gc
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
    forward = staticmethod(lambda ctx, partial_sum: summed(partial_sum))
    backward = staticmethod(lambda ctx, gradient: gradient)


def worker(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    alone = [nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)]
    mine = [  # rows of the first weight, columns of the second
        nn.Parameter(layer.weight.detach().chunk(world_size, dim)[rank].clone())
        for dim, layer in enumerate(alone)
    ]

    def forward(x):
        hidden = torch.tanh(CopyToRegion.apply(x) @ mine[0].T)
        return ReduceFromRegion.apply(hidden @ mine[1].T)

    adams = [torch.optim.Adam(nn.Sequential(*alone).parameters()), torch.optim.Adam(mine)]
    for x in torch.randn(5, 8, 16):  # the same on all ranks
        losses = [y.square().mean() for y in (alone[1](torch.tanh(alone[0](x))), forward(x))]
        for loss, adam in zip(losses, adams):
            adam.zero_grad()
            loss.backward()
            adam.step()
    if rank == 0:
        weight = abs(alone[0].weight.chunk(world_size)[0] - mine[0]).max()
        print(f"{world_size} ranks, {len(mine[0])} of {len(alone[0].weight)} rows each:", end=" ")
        print(f"loss off by {abs(losses[0] - losses[1]):.5f}, weight by {weight:.5f}")
    gc.collect()  # cycles keep the group alive, and gloo may then abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    for world_size in (2, 4):
        mp.spawn(worker, args=(world_size,), nprocs=world_size)
