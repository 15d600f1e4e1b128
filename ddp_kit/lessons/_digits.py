"""Digits as tensors on a rank's device, and what several lessons read from a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_kit import device, mnist
from ddp_kit.data import DEVIATION, MEAN

if TYPE_CHECKING:
    from torchvision.datasets import MNIST


def as_batch(digits: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a dataset as one batch: images (count, 1, 28, 28), labels (count,)."""
    images, labels = zip(*(digits[i] for i in range(len(digits))), strict=True)
    return torch.stack(images).to(device()), torch.tensor(labels, device=device())


def first_digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first training digits as one batch."""
    digits = mnist()
    if not 1 <= count <= len(digits):
        raise ValueError(f"count must be from 1 to {len(digits):,}, got {count}")
    return _in_one_go(digits, count)


def _in_one_go(digits: MNIST, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `as_batch` returns for the first digits, to the last bit, without its loop."""
    images = (digits.data[:count, None] / 255 - MEAN) / DEVIATION
    return images.to(device()), digits.targets[:count].to(device())


@torch.no_grad()
def accuracy(model: nn.Module, full: bool = False) -> float:
    """Return the fraction of test digits that the model classifies correctly.

    full: of all 10,000 test digits, else of the 2,000 that are part of the package.
    """
    model.eval()
    digits = mnist(train=False, full=full)
    images, labels = _in_one_go(digits, len(digits))
    guesses = torch.cat([model(some).argmax(1) for some in images.split(1000)])
    model.train()
    return (guesses == labels).sum().item() / len(labels)


def flat(tensors) -> torch.Tensor:
    """Return many tensors as one flat copy on the CPU."""
    return torch.cat([tensor.detach().view(-1) for tensor in tensors]).cpu()
