"""ZeRO by hand beside Adam in one process. Needs PyTorch and nothing else."""

import gc
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def worker(rank, world_size):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)))
    model, alone = models
    flat = parameters_to_vector(model.parameters()).detach()
    own = nn.Parameter(flat.chunk(world_size)[rank].clone())
    adam, reference = torch.optim.Adam([own]), torch.optim.Adam(alone.parameters())
    for _ in range(5):
        batch = torch.randn(16, 16)  # the same on all ranks
        model.zero_grad()
        model(batch.chunk(world_size)[rank]).square().mean().backward()
        gradient = parameters_to_vector([p.grad for p in model.parameters()]) / world_size
        own.grad = torch.empty_like(own)
        dist.reduce_scatter(own.grad, list(gradient.chunk(world_size)))
        adam.step()
        dist.all_gather(list(flat.chunk(world_size)), own.detach())
        vector_to_parameters(flat, model.parameters())
        reference.zero_grad()
        alone(batch).square().mean().backward()
        reference.step()
    difference = (flat - parameters_to_vector(alone.parameters())).abs().max().item()
    if rank == 0:
        print(f"{world_size} ranks differ from one process by {difference:.5f} at most;", end=" ")
        kept = sum(state.numel() for state in adam.state[own].values() if state.ndim)
        print(f"a rank keeps {kept} of the {2 * len(flat)} numbers that are Adam's states")
    gc.collect()  # cycles keep the group alive, and gloo may then abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    for world_size in (2, 4):
        mp.spawn(worker, args=(world_size,), nprocs=world_size)
