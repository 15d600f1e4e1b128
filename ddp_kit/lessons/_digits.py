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
    """Return a dataset as one batch: float32 images (count, 1, 28, 28), int64 labels (count,)."""
    images, labels = zip(*(digits[i] for i in range(len(digits))), strict=True)
    return torch.stack(images).to(device()), torch.tensor(labels, device=device())


def first_digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `count` training digits as one batch, as `as_batch` does.

    Raises ValueError unless count is from 1 to 10,000.
    """
    digits = mnist()
    if not 1 <= count <= len(digits):
        raise ValueError(f"count must be from 1 to {len(digits):,}, got {count}")
    return _first_as_batch(digits, count)


def _first_as_batch(digits: MNIST, count: int) -> tuple[torch.Tensor, torch.Tensor]:
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
    images, labels = _first_as_batch(digits, len(digits))
    guesses = torch.cat([model(some).argmax(1) for some in images.split(1000)])
    model.train()
    return (guesses == labels).sum().item() / len(labels)


def flat(tensors) -> torch.Tensor:
    """Return many tensors as one flat copy on the CPU."""
    return torch.cat([tensor.detach().view(-1) for tensor in tensors]).cpu()
