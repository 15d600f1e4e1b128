"""The ways to train one model with or without ZeRO, by hand and by PyTorch, as one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_kit import device
from ddp_kit.lessons._fully_sharded import (
    FullySharded,
    FullyShardedDataParallel,
    ShardedGradient,
)
from ddp_kit.lessons._gpt import GPT, Batch, loss_of, part_of
from ddp_kit.lessons._sharded_optimizer import ShardedGradients, ShardedOptimizer

BATCH = 12  # sequences of all ranks together: 1, 2, 3 and 4 divide it
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# With its usual eps of 1e-8, Adam makes rounding errors of tiny gradients as large as its steps.
ADAM = partial(torch.optim.Adam, lr=1e-3, eps=1e-5)
# With the bytes of their states for each parameter.
OPTIMIZERS = {
    "SGD": (partial(torch.optim.SGD, lr=0.1), 0),
    "SGD with momentum": (SGD, 4),
    "Adam": (ADAM, 8),
}


@dataclass
class Training:
    """A model that is trained in one of the `WAYS`.

    full: returns all parameters by name. finish: called after backward. after: called after the
    optimizer's step. sharded: the parameters whose gradients stages 2 and 3 shard.
    """

    model: nn.Module
    optimizer: Optimizer
    full: Callable[[], dict[str, torch.Tensor]]
    finish: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    sharded: Sequence[ShardedGradient] = ()


def take_steps(
    training: Training, data: Iterable[Batch], rank: int, world_size: int
) -> list[float]:
    """Train on this rank's part of each batch; return its losses."""
    losses = []
    for batch in data:
        training.optimizer.zero_grad()
        loss = loss_of(training.model, *part_of(batch, rank, world_size))
        loss.backward()
        training.finish()
        training.optimizer.step()
        training.after()
        losses.append(loss.item())
    return losses


def start_ddp(model: nn.Module, optimizer_cls: Callable) -> Training:
    """Train as DistributedDataParallel does: every rank keeps everything."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)  # no second copy
    return Training(wrapped, optimizer_cls(model.parameters()), partial(copies, model))


def start_stage_1(model: nn.Module, optimizer_cls: Callable) -> Training:
    """Shard the states of the optimizer."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ShardedOptimizer(model.parameters(), optimizer_cls)
    return Training(wrapped, optimizer, partial(copies, model))


def start_stage_2(model: nn.Module, optimizer_cls: Callable) -> Training:
    """Shard the gradients, too."""
    sharded = ShardedGradients(model.parameters())
    return Training(
        model,
        optimizer_cls(sharded.rows),
        partial(copies, model),
        sharded.finish_gradient_synchronization,
        sharded.gather,
        sharded.sharded,
    )


def start_stage_3(
    model: nn.Module, optimizer_cls: Callable, compute_dtype: torch.dtype | None = None
) -> Training:
    """Shard the parameters, too: all of them, or, with a compute_dtype, all but small ones."""
    low = compute_dtype and FullyShardedDataParallel(model, compute_dtype)
    wrapped = low or FullySharded(model)
    return Training(
        wrapped,
        optimizer_cls(wrapped.parameters()),
        wrapped.gather_full_params,
        wrapped.finish_gradient_synchronization,
        sharded=wrapped.sharded,
    )


def start_zero_redundancy(model: nn.Module, optimizer_cls: Callable) -> Training:
    """Use PyTorch's stage 1, ZeroRedundancyOptimizer."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optimizer_cls)
    return Training(wrapped, optimizer, partial(copies, model))


def start_fully_shard(model: GPT, optimizer_cls: Callable) -> Training:
    """Use PyTorch's stage 3: fully_shard on each block, and on the rest."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)

    def full() -> dict[str, torch.Tensor]:
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    return Training(model, optimizer_cls(model.parameters()), full)


WAYS: dict[str, Callable[..., Training]] = {
    "DDP": start_ddp,
    "stage 1": start_stage_1,
    "stage 2": start_stage_2,
    "stage 3": start_stage_3,
    "ZeroRedundancyOptimizer": start_zero_redundancy,
    "fully_shard": start_fully_shard,
}


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
