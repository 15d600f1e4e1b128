"""Digits as tensors on a rank's device, and what several lessons read from a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddp_kit import device, mnist
from ddp_kit.data import DEVIATION, MEAN

if TYPE_CHECKING:
    from torchvision.datasets import MNIST


def first_digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training digits: float32 images (count, 1, 28, 28), int64 labels (count,)."""
    return _as_batch(mnist(), count)


def _as_batch(digits: MNIST, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a loop over the first digits would, to the last bit."""
    images = (digits.data[:count, None] / 255 - MEAN) / DEVIATION
    return images.to(device()), digits.targets[:count].to(device())


@torch.no_grad()
def accuracy(model: nn.Module, full: bool = False) -> float:
    """Return the fraction of test digits that the model classifies correctly.

    full: of all 10,000 test digits, else of the 2,000 that are part of the package.
    """
    model.eval()
    digits = mnist(train=False, full=full)
    images, labels = _as_batch(digits, len(digits))
    guesses = torch.cat([model(some).argmax(1) for some in images.split(1000)])
    model.train()
    return (guesses == labels).sum().item() / len(labels)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().view(-1) for tensor in tensors]).cpu()
