"""The digits cut into parts, and the network that learns them: the tutorial's own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from ddp_kit import device, mnist

SEED = 1234


class Partition(Dataset):
    """The part of a dataset that an index list names."""

    def __init__(self, data: Dataset, index: Sequence[int]) -> None:
        self.data, self.index = data, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int):
        return self.data[self.index[position]]


class DataPartitioner:
    """Cut a dataset at random into parts of the given sizes, the same on every rank.

    sizes: fractions of the whole, such as (0.25, 0.25, 0.25, 0.25).
    """

    def __init__(self, data: Dataset, sizes: Sequence[float], seed: int = SEED) -> None:
        self.data = data
        self.partitions: list[list[int]] = []
        index = list(range(len(data)))
        Random(seed).shuffle(index)
        for size in sizes:
            length = int(size * len(data))
            self.partitions.append(index[:length])
            index = index[length:]

    def use(self, part: int) -> Partition:
        """Return one of the parts."""
        return Partition(self.data, self.partitions[part])


class Net(nn.Module):
    """The tutorial's network: two convolutions, two linear layers, 21,840 parameters.

    Takes (batch, 1, 28, 28), gives log-probabilities of shape (batch, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the log-probabilities."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def as_batch(digits: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a dataset into one batch: images (count, 1, 28, 28), labels (count,)."""
    images, labels = zip(*(digits[i] for i in range(len(digits))), strict=True)
    return torch.stack(images).to(device()), torch.tensor(labels, device=device())


def first_digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first training digits as one batch."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    return as_batch(Partition(mnist(), range(count)))
