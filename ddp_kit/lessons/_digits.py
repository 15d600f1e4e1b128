"""Digits as tensors on a rank's device, and what several lessons read from a network."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from ddp_kit import device, mnist


def as_batch(digits: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a dataset as one batch: images (count, 1, 28, 28), labels (count,)."""
    images, labels = zip(*(digits[i] for i in range(len(digits))), strict=True)
    return torch.stack(images).to(device()), torch.tensor(labels, device=device())


def first_digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first training digits as one batch."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    return as_batch(Subset(mnist(), range(count)))


@torch.no_grad()
def accuracy(model: nn.Module, full: bool = False) -> float:
    """Return the fraction of test digits that the model classifies correctly.

    full: of all 10,000 test digits, else of the 2,000 that are part of the package.
    """
    model.eval()
    images, labels = as_batch(mnist(train=False, full=full))
    guesses = torch.cat([model(some).argmax(1) for some in images.split(1000)])
    model.train()
    return (guesses == labels).sum().item() / len(labels)


def flat(tensors) -> torch.Tensor:
    """Return many tensors as one flat copy on the CPU."""
    return torch.cat([tensor.detach().view(-1) for tensor in tensors]).cpu()
