"""Data-parallel training in plain PyTorch, on four ranks and made-up data."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def partition_dataset(rank, world_size):
    torch.manual_seed(0)  # every rank makes up the same data: points around ten centres
    centres, labels = torch.randn(10, 64), torch.randint(10, (8000,))
    points = centres[labels] + 2 * torch.randn(8000, 64)
    mine = torch.randperm(8000).split(8000 // world_size)[rank]  # parts of equal length
    part = TensorDataset(points[mine], labels[mine])
    return DataLoader(part, batch_size=128 // world_size, shuffle=True)


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    batches = partition_dataset(rank, world_size)
    torch.manual_seed(1234)  # the same start on every rank
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(4):
        total = torch.zeros(1)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.detach() / len(batches) / world_size
        dist.all_reduce(total)  # the mean over the points of all ranks
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.2f}")
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    replicas = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(replicas, mine)
    if rank == 0:
        print("replicas differ by at most", (torch.stack(replicas) - mine).abs().max().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server:  # 0: any port that is free
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    mp.spawn(train, args=(4,), nprocs=4)
