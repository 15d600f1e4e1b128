"""`nn.DataParallel` by hand, on GPUs or on virtual devices, and its eight steps one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from ddp_kit import device

LOSS = F.nll_loss

# The parameters and buffers of the network on one device, by name.
Replica: TypeAlias = dict[str, torch.Tensor]


def devices(count: int) -> list[torch.device]:
    """Return `count` GPUs if this machine has that many, else `count` virtual devices."""
    if 1 < count <= torch.cuda.device_count():
        return [torch.device("cuda", index) for index in range(count)]
    return virtual(count)


def virtual(count: int) -> list[torch.device]:
    """Return this process's own device `count` times; each time counts as a virtual device."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    return [device()] * count


def are_real(places: Sequence[torch.device]) -> bool:
    """Return whether the devices differ, so that they are GPUs and not virtual devices."""
    return len(set(places)) > 1


def scatter(batch: torch.Tensor, places: Sequence[torch.device]) -> list[torch.Tensor]:
    """Cut the batch into chunks; the first stays on device 0, the others are copied."""
    chunks = batch.chunk(len(places))
    others = [chunks[i].to(places[i], copy=True) for i in range(1, len(chunks))]
    return [chunks[0], *others]


def replicate(model: nn.Module, places: Sequence[torch.device]) -> list[Replica]:
    """Copy the network to every device but the first, whose replica shares the model's memory.

    Backward goes through the copies and sums the gradients of all replicas on device 0.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    first = {name: tensor.view_as(tensor) for name, tensor in tensors.items()}
    return [first] + [
        {name: tensor.to(place, copy=True) for name, tensor in tensors.items()}
        for place in places[1:]
    ]


def parallel_apply(
    model: nn.Module, replicas: Sequence[Replica], shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Call the model once for each device, with that device's replica and shard."""
    both = zip(replicas, shards, strict=True)
    return [functional_call(model, replica, shard) for replica, shard in both]


def gather(outputs: Sequence[torch.Tensor], place: torch.device) -> torch.Tensor:
    """Concatenate all outputs on one device."""
    return torch.cat([output.to(place) for output in outputs])


class ByHand(nn.Module):
    """A wrapper that computes what `nn.DataParallel` does, on GPUs or on virtual devices."""

    def __init__(self, module: nn.Module, places: Sequence[torch.device]) -> None:
        super().__init__()
        self.module, self.places = module, places

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the outputs for the whole batch, on device 0."""
        shards = scatter(batch, self.places)
        replicas = replicate(self.module, self.places[: len(shards)])
        outputs = parallel_apply(self.module, replicas, shards)
        return gather(outputs, self.places[0])


def eight_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    places: Sequence[torch.device],
    loss_of: Callable = LOSS,
) -> Iterator[tuple[str, str, list[list[torch.Tensor]]]]:
    """Train one step as DataParallel does, and yield after each of the eight.

    Yields (step, kind, new): the tensors that the step made, as one list for each device that
    got some, starting with device 0. Model and batch must be on device 0, as for DataParallel.
    """
    optimizer.zero_grad()
    shards = scatter(images, places)
    yield "scatter", "shard", [[shard] for shard in shards]

    replicas = replicate(model, places[: len(shards)])
    names = [name for name, _ in model.named_parameters()]
    copies = [[replica[name] for name in names] for replica in replicas]
    yield "replicate", "replica", copies

    outputs = parallel_apply(model, replicas, shards)
    yield "parallel apply", "outputs", [[output] for output in outputs]

    gathered = gather(outputs, places[0])
    del shards, replicas, outputs  # what backward needs of them stays, as on GPUs
    yield "gather", "gathered, loss", [[gathered]]

    loss = loss_of(gathered, labels)
    yield "loss", "gathered, loss", [[loss]]

    # loss.backward() does both of the next steps; here we stop between them, at the replicas.
    every_copy = [tensor for copy in copies for tensor in copy]
    gradients = torch.autograd.grad(loss, every_copy)
    width = len(copies[0])
    per_replica = [gradients[i : i + width] for i in range(0, len(gradients), width)]
    yield "backward", "gradients", [list(one) for one in per_replica]

    torch.autograd.backward(every_copy, gradients)
    del copies, every_copy, gradients, per_replica
    yield "reduce", "gradients", [[parameter.grad for parameter in model.parameters()]]

    optimizer.step()
    yield "update", "parameters", [list(model.parameters())]
