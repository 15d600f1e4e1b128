# Made from notebooks/03_partitioned_sgd.ipynb by `make editions`: edit that, not this.
"""Partitioned SGD: four replicas learn as one."""

from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ddp_kit as kit
from ddp_kit.lessons._digits import accuracy, first_digits, flat
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._partitioned_sgd import main, train_beside_ddp, whole_batch_gradient

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


def train_step(model, optimizer, images, labels, average=average_gradients):
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()
    average(model)  # the only communication
    optimizer.step()
    return loss.item()


def new_replica(wrap=None, lr=0.02, momentum=0.9):
    torch.manual_seed(SEED)  # the same start on every rank
    model = Net().to(kit.device())
    model = wrap(model) if wrap else model
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def keep_gradients(model):
    "Average nothing: each rank keeps its own."


def mean_gradient(rank, world_size, average=average_gradients, sizes=None):
    model, optimizer = new_replica()
    model.eval()  # without dropout
    sizes = sizes or [32] * world_size  # digits of each rank
    images, labels = (part.split(sizes)[rank] for part in first_digits(sum(sizes)))
    train_step(model, optimizer, images, labels, average)
    return flat(parameter.grad for parameter in model.parameters())


def average_gradients_flat(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    buffer = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
    buffer /= dist.get_world_size()
    pieces = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def train(
    rank,
    world_size,
    average=average_gradients,
    wrap=None,
    epochs=3,
    lr=0.02,
    momentum=0.9,
    full=False,
):
    model, optimizer = new_replica(wrap, lr, momentum)
    batches = partition_dataset(rank, world_size, full)
    losses = []
    for _ in kit.progress(range(epochs)):
        steps = [train_step(model, optimizer, *batch, average) for batch in batches]
        losses.append(sum(steps) / len(steps))
    parameters = flat(model.parameters())
    return {"losses": losses, "accuracy": accuracy(model, full), "parameters": parameters}


def first_steps(rank, world_size, lr=0.03, average=average_gradients_flat, steps=24):
    model, optimizer = new_replica(lr=lr)
    model.double().eval()  # without dropout
    images, labels = (part.split(GLOBAL_BATCH) for part in first_digits(8 * GLOBAL_BATCH))
    losses, distances = [], []
    for step in range(steps):
        x, y = images[step % 8][rank::world_size], labels[step % 8][rank::world_size]
        loss = train_step(model, optimizer, x.double(), y, average)
        whole = torch.tensor(loss * len(y) / GLOBAL_BATCH, dtype=torch.float64, device=x.device)
        dist.all_reduce(whole)
        losses.append(whole.item())
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        rank_0 = mine.clone()
        dist.broadcast(rank_0, src=0)
        distances.append((mine - rank_0).norm().item())
    return {"losses": losses, "distances": distances}


def slowest(result):
    steps = {name: zip(*(rank[name] for rank in result), strict=True) for name in result[0]}
    return {name: list(map(max, ranks)) for name, ranks in steps.items()}


if __name__ == "__main__":
    run_as_script(main)
