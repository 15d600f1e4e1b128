# Made from notebooks/03_partitioned_sgd.ipynb by `make editions`: edit that, not this. 0dffa5fde371
"""Partitioned SGD: four replicas learn as one."""

from random import Random
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ddp_kit as kit
from ddp_kit.lessons._digits import accuracy, first_digits, flat
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._partitioned_sgd import (
    USUAL_RATES,
    explore,
    main,
    repeat_tutorial,
    train_beside_ddp,
    whole_batch_gradient,
)

SEED = 1234


GLOBAL_BATCH = 128


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


class DataPartitioner:
    def __init__(self, data, sizes, seed=SEED):
        self.data, self.partitions = data, []
        index = list(range(len(data)))
        Random(seed).shuffle(index)
        for size in sizes:
            length = int(size * len(data))
            self.partitions.append(index[:length])
            index = index[length:]

    def use(self, part):
        return Partition(self.data, self.partitions[part])


class Partition(Dataset):
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, position):
        return self.data[self.index[position]]


def as_batch(digits):
    images, labels = zip(*(digits[i] for i in range(len(digits))), strict=True)
    return torch.stack(images).to(kit.device()), torch.tensor(labels, device=kit.device())


def partition_dataset(rank, world_size, full=False):
    digits = kit.mnist(full=full)  # full: all 60,000; else the first 10,000
    part = DataPartitioner(digits, [1 / world_size] * world_size).use(rank)
    images, labels = as_batch(part)
    batch_size = GLOBAL_BATCH // world_size
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True)


def average_gradients(model):
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= world_size


def mean_gradient(rank, world_size, per_rank=32, average=average_gradients):
    torch.manual_seed(SEED)
    model = Net().to(kit.device()).eval()  # without dropout
    images, labels = first_digits(per_rank * world_size)
    shard = slice(rank * per_rank, (rank + 1) * per_rank)
    F.nll_loss(model(images[shard]), labels[shard]).backward()
    average(model)
    return flat(parameter.grad for parameter in model.parameters())


def keep_gradients(model):
    "Average nothing: each rank keeps its own."


def average_gradients_flat(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    buffer = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
    buffer /= dist.get_world_size()
    pieces = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def train_step(model, optimizer, images, labels, average=average_gradients):
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()
    average(model)  # the only communication
    optimizer.step()
    return loss.item()


def train(rank, world_size, epochs=3, average=average_gradients, lr=0.01, momentum=0.5, full=False):
    torch.manual_seed(SEED)  # the same start on every rank
    batches = partition_dataset(rank, world_size, full)
    model = Net().to(kit.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses = []
    for _ in kit.progress(range(epochs)):
        total = 0.0
        for images, labels in batches:
            total += train_step(model, optimizer, images, labels, average)
        losses.append(total / len(batches))
    parameters = flat(model.parameters())
    return {"losses": losses, "accuracy": accuracy(model, full), "parameters": parameters}


def train_ddp(rank, world_size, epochs=3, lr=0.01, momentum=0.5):
    torch.manual_seed(SEED)
    batches = partition_dataset(rank, world_size)
    model = DistributedDataParallel(Net().to(kit.device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for _ in kit.progress(range(epochs)):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()  # DDP averages the gradients in here
            optimizer.step()
    return flat(model.parameters())


def first_steps(rank, world_size, lr=0.03, average=average_gradients_flat, steps=24):
    torch.manual_seed(SEED)
    model = Net().to(kit.device(), torch.float64).eval()  # without dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    images, labels = (part.split(GLOBAL_BATCH) for part in first_digits(8 * GLOBAL_BATCH))
    losses = []
    for step in range(steps):
        x, y = images[step % 8][rank::world_size], labels[step % 8][rank::world_size]
        optimizer.zero_grad()
        loss = F.nll_loss(model(x.double()), y)
        loss.backward()
        average(model)
        optimizer.step()
        whole = loss.detach() * len(y) / GLOBAL_BATCH
        dist.all_reduce(whole)
        losses.append(whole.item())
    return losses


VARIANTS = {
    "no communication": (lambda model: model, keep_gradients),
    "one all_reduce per parameter": (lambda model: model, average_gradients),
    "one flat all_reduce": (lambda model: model, average_gradients_flat),
    "DistributedDataParallel": (DistributedDataParallel, keep_gradients),
}


def step_seconds(rank, world_size, steps=30):
    images, labels = (part[rank::world_size] for part in first_digits(GLOBAL_BATCH))
    replicas = {}
    for name, (wrap, average) in VARIANTS.items():
        model = wrap(Net().to(kit.device()))
        replicas[name] = model, torch.optim.SGD(model.parameters(), lr=0.01), average
    seconds = {name: [] for name in VARIANTS}
    for step in range(steps + 3):
        for name, (model, optimizer, average) in replicas.items():
            dist.barrier()
            start = perf_counter()
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            average(model)
            optimizer.step()
            if images.is_cuda:
                torch.cuda.synchronize()
            if step >= 3:  # the first steps warm up
                seconds[name].append(perf_counter() - start)
    return seconds


def slowest(result):
    steps = {name: zip(*(rank[name] for rank in result), strict=True) for name in result[0]}
    return {name: list(map(max, ranks)) for name, ranks in steps.items()}


if __name__ == "__main__":
    run_as_script(main)
