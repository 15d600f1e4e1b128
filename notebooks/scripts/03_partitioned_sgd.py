"""Data-parallel training in plain PyTorch, on four ranks and made-up data."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, PyTorch 2.13 would keep the group alive
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    average_gradients(model)
    optimizer.step()
    return loss.detach()


def train(rank, world_size):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(1234)  # the same data and the same parameters on every rank
    centres, labels = torch.randn(10, 64), torch.randint(10, (8000,))
    points = centres[labels] + 2 * torch.randn(8000, 64)  # scattered around ten centres
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    part = TensorDataset(points[rank::world_size], labels[rank::world_size])
    batches = DataLoader(part, batch_size=128 // world_size, shuffle=True)
    for epoch in range(4):
        total = torch.zeros(1)
        for batch in batches:
            total += train_step(model, optimizer, *batch) / len(batches) / world_size
        dist.all_reduce(total)  # the mean over all ranks
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.2f}")
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    replicas = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(replicas, mine)
    if rank == 0:
        print("replicas differ by at most", (torch.stack(replicas) - mine).abs().max().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(train, args=(4,), nprocs=4)
