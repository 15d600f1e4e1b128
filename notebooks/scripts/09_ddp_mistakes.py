"""Find out whether the replicas of a model are still equal, in plain PyTorch on two ranks."""

import gc
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def greatest_difference(model):
    """Return how far any tensor in the state_dict of any rank is from rank 0's."""
    differences = []
    for tensor in model.state_dict().values():
        reference = tensor.clone()
        dist.broadcast(reference, src=0)
        differences.append((tensor - reference).abs().max().float())
    worst = torch.stack(differences).max()  # where the model is, as nccl needs it
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def train(rank, unwrap):
    torch.manual_seed(rank)  # another start and other data on each rank
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    called = model.module if unwrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        called(torch.randn(8, 4) + rank).square().mean().backward()
        optimizer.step()
    return greatest_difference(model.module)


def worker(rank, world_size):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for unwrap in (False, True):
        difference = train(rank, unwrap)
        if rank == 0:
            name = "model.module(x)" if unwrap else "model(x)"
            print(f"{name:15} replicas differ by {difference:.2f}")
    gc.collect()  # cycles keep the group alive, and gloo may then abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(2,), nprocs=2)
