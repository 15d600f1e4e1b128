"""DistributedDataParallel by hand: each gradient is averaged while the backward goes on.

First a message for each gradient, then buckets. Source: Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (2020), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_kit import device
from ddp_kit.lessons._digits import first_digits, flat
from ddp_kit.lessons.partitioned_sgd import Net

FINISH_FIRST = "gradients are still being averaged: call finish_gradient_synchronization() first"


class Replicated(nn.Module):
    """Wraps a module; all ranks start with the parameters and buffers of rank 0.

    A parameter that two modules share is sent once.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **named)


class DistributedDataParallel(Replicated):
    """Averages the gradients of a module over all ranks, each as soon as it is complete.

    Call `finish_gradient_synchronization` after each backward: before the optimizer's step, and
    before another backward that adds to the gradients. All ranks must use the same parameters, in
    the same order. The gradient of a parameter that two modules share is sent once. Nothing is
    sent for a parameter that is frozen or that no rank has used, and its gradient stays None.
    Freeze parameters before you wrap the module: those that are trained get their hooks here.

    Raises RuntimeError in a backward if the gradients of the one before are still being averaged.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.sending: dict[torch.Tensor, dist.Work] = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start_average)

    def start_average(self, parameter: torch.Tensor) -> None:
        """Begin to replace a gradient with its mean over all ranks."""
        if parameter in self.sending:
            raise RuntimeError(FINISH_FIRST)
        parameter.grad /= dist.get_world_size()
        self.sending[parameter] = dist.all_reduce(parameter.grad, async_op=True)

    def finish_gradient_synchronization(self) -> None:
        """Wait until all gradients are means."""
        for work in self.sending.values():
            work.wait()
        self.sending.clear()


def buckets_by_hand(sizes: Iterable[int], cap: float, first_cap: float) -> list[int]:
    """Return how many gradients are in each bucket.

    sizes: bytes of the gradients, in the order in which they are ready. cap: of a bucket, in bytes;
    it is closed when it has reached the cap. first_cap: that of the first bucket.
    """
    counts, held = [0], 0
    for size in sizes:
        if held >= (cap if len(counts) > 1 else first_cap):
            counts, held = [*counts, 0], 0
        counts[-1] += 1
        held += size
    return counts


class Bucket:
    """Some gradients that travel as one tensor, which leaves when the last of them is ready."""

    def __init__(self, length: int) -> None:
        self.length, self.ready, self.work = length, [], None

    def add(self, parameter: torch.Tensor) -> None:
        """Take a parameter whose gradient is ready."""
        if any(parameter is other for other in self.ready):
            raise RuntimeError(FINISH_FIRST)
        self.ready.append(parameter)
        if len(self.ready) == self.length:
            self.start_average()

    def start_average(self) -> None:
        """Begin to compute the mean over all ranks."""
        gradients = [parameter.grad.flatten() for parameter in self.ready]
        self.flat = torch.cat(gradients) / dist.get_world_size()
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        """Wait for the mean, and copy it into the gradients."""
        self.work.wait()
        pieces = self.flat.split([parameter.numel() for parameter in self.ready])
        for parameter, piece in zip(self.ready, pieces, strict=True):
            parameter.grad.copy_(piece.view_as(parameter))
        self.ready, self.work = [], None


class BucketedDistributedDataParallel(DistributedDataParallel):
    """Does the same with fewer messages: several gradients share a bucket.

    Buckets are filled in the reverse order in which the module has its parameters. bucket_cap_mb:
    a bucket is closed when it has reached so many MiB; without it, at 25 MiB, and the first one at
    1 MiB. A bucket with a parameter that no rank has used leaves when the backward is over.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float | None = None) -> None:
        super().__init__(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
        cap, first_cap = 2**20 * (bucket_cap_mb or 25), 2**20 * (bucket_cap_mb or 1)
        self.buckets = [Bucket(length) for length in buckets_by_hand(sizes, cap, first_cap)]
        owners = [bucket for bucket in self.buckets for _ in range(bucket.length)]
        self.bucket_of = dict(zip(trained, owners, strict=True))

    def start_average(self, parameter: torch.Tensor) -> None:
        """Put a gradient into its bucket, which leaves when it is complete."""
        self.bucket_of[parameter].add(parameter)

    def finish_gradient_synchronization(self) -> None:
        """Wait until all gradients are means."""
        for bucket in self.buckets:
            if bucket.ready and bucket.work is None:  # a parameter in it was not used
                bucket.start_average()
        for bucket in self.buckets:
            if bucket.ready:
                bucket.finish()


class ByHand(DistributedDataParallel):
    """Waits for each mean at once, so that nothing overlaps with the backward."""

    def start_average(self, parameter: torch.Tensor) -> None:
        """Replace a gradient with its mean over all ranks."""
        super().start_average(parameter)
        self.finish_gradient_synchronization()


def shard_gradient(
    rank: int, world_size: int, wrap: Callable[[nn.Module], nn.Module], per_rank: int = 32
) -> torch.Tensor:
    """Wrap a network that starts differently on each rank; return its flat gradient.

    Each rank has `per_rank` digits of its own.
    """
    torch.manual_seed(rank)
    model = wrap(Net().to(device()).eval())  # without dropout, which is random
    images, labels = first_digits(per_rank * world_size)
    F.nll_loss(model(images[rank::world_size]), labels[rank::world_size]).backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()
    return flat(parameter.grad for parameter in model.parameters())


def tied_and_frozen() -> nn.Sequential:
    """Return a network whose last layer has the first one's weight; the second is frozen."""
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    layers[3].weight = layers[0].weight
    layers[1].requires_grad_(False)
    return nn.Sequential(*layers).to(device())


def train_tied(
    rank: int, world_size: int, wrap: Callable[[nn.Module], nn.Module], rows: int = 12
) -> torch.Tensor:
    """Train `tied_and_frozen`, which starts differently on each rank; return its flat parameters.

    There are three steps. rows: of the batch of a step, for all ranks together.
    """
    torch.manual_seed(rank)
    model = wrap(tied_and_frozen())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in torch.arange(18.0 * rows, device=device()).sin().view(3, rows, 6):
        optimizer.zero_grad()
        model(x[rank::world_size]).square().mean().backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
    return flat(model.parameters())
