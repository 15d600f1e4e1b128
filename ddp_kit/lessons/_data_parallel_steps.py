"""The eight steps of `nn.DataParallel`: PyTorch's own on GPUs, stand-ins on virtual devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from ddp_kit import device

LOSS = F.nll_loss


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
    """Return whether the devices differ, so that PyTorch's own functions can run on them."""
    return len(set(places)) > 1


def scatter(batch: torch.Tensor, places: Sequence[torch.device]) -> list[torch.Tensor]:
    """Cut the batch into chunks; the first stays on device 0, the others are copied."""
    if are_real(places):
        return list(nn.parallel.scatter(batch, places))
    first, *others = batch.chunk(len(places))
    return [first, *(chunk.clone() for chunk in others)]


@dataclass(frozen=True)
class Replica:
    """The network on one device: a function that calls it, and its parameters there."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    parameters: list[torch.Tensor]


def replicate(model: nn.Module, places: Sequence[torch.device]) -> list[Replica]:
    """Copy the network to every device but the first, whose replica shares the model's memory.

    Backward goes through the copies and sums the gradients of all replicas on device 0.
    """
    names = [name for name, _ in model.named_parameters()]
    if are_real(places):
        modules = nn.parallel.replicate(model, places)
        return [Replica(m, [attrgetter(name)(m) for name in names]) for m in modules]
    replicas = []
    for index in range(len(places)):
        copy = torch.clone if index else lambda tensor: tensor.view_as(tensor)
        parameters = {name: copy(p) for name, p in model.named_parameters()}
        buffers = {name: copy(b) for name, b in model.named_buffers()}
        replicas.append(Replica(_caller(model, parameters | buffers), list(parameters.values())))
    return replicas


def _caller(model: nn.Module, tensors: dict[str, torch.Tensor]) -> Callable:
    return lambda shard: functional_call(model, tensors, (shard,))


def parallel_apply(
    replicas: Sequence[Replica], shards: Sequence[torch.Tensor], places: Sequence[torch.device]
) -> list[torch.Tensor]:
    """Call each replica with its shard: in one thread per GPU, else one after the other."""
    if are_real(places):
        used = places[: len(replicas)]
        return nn.parallel.parallel_apply([r.forward for r in replicas], shards, devices=used)
    return [replica.forward(shard) for replica, shard in zip(replicas, shards, strict=True)]


def gather(outputs: Sequence[torch.Tensor], places: Sequence[torch.device]) -> torch.Tensor:
    """Concatenate all outputs on device 0; a single one is already there."""
    if len(outputs) == 1:
        return outputs[0]
    if are_real(places):
        return nn.parallel.gather(outputs, places[0])
    return torch.cat(list(outputs))


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
    copies = [replica.parameters for replica in replicas]
    yield "replicate", "replica", copies

    outputs = parallel_apply(replicas, shards, places)
    yield "parallel apply", "outputs", [[output] for output in outputs]

    gathered = gather(outputs, places)
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
