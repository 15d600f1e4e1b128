"""Partitioned SGD: every rank trains on its part of the digits; gradients are averaged.

The tutorial's own data-parallel training, whole: `Partition`, `DataPartitioner`, `Net`,
`average_gradients`, with its hyper-parameters. Source: "Writing Distributed Applications with
PyTorch", section Distributed Training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_kit import device, mnist, progress
from ddp_kit.failures import count
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._digits import (  # noqa: F401 - the notebook uses them
    SEED,
    DataPartitioner,
    Net,
    Partition,
    as_batch,
    first_digits,
)

if TYPE_CHECKING:
    from ddp_kit.notebook.explorer import Explorer

GLOBAL_BATCH = 128
USUAL_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks: one all_reduce per parameter."""
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= world_size


def average_gradients_flat(model: nn.Module) -> None:
    """Do the same with one all_reduce: all gradients share one flat buffer."""
    gradients = [parameter.grad for parameter in model.parameters()]
    buffer = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
    buffer /= dist.get_world_size()
    pieces = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def keep_gradients(model: nn.Module) -> None:
    """Leave each rank its own gradients; what a single process does, too."""


def partition_dataset(rank: int, world_size: int) -> DataLoader:
    """Load this rank's part of the digits, 128 // world_size in a batch."""
    part = DataPartitioner(mnist(), [1 / world_size] * world_size).use(rank)
    images, labels = as_batch(part)  # transformed once, instead of once an epoch
    # A batch size must be a whole number: 128 / world_size would be a float.
    batch_size = GLOBAL_BATCH // world_size
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True)


def train(
    rank: int,
    world_size: int,
    epochs: int = 3,
    average: Callable[[nn.Module], None] = average_gradients,
    lr: float = 0.01,
    momentum: float = 0.5,
) -> dict:
    """Train one replica on this rank's part of the digits.

    Returns "losses" (mean training loss of each epoch), "accuracy" (on the 2,000 test digits,
    0 to 1), and "parameters" (all of them, one flat tensor).
    """
    torch.manual_seed(SEED)  # the same start on every rank
    batches = partition_dataset(rank, world_size)
    model = Net().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses = []
    for _ in progress(range(epochs)):
        total = 0.0
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images.to(device())), labels.to(device()))
            total += loss.item()
            loss.backward()
            average(model)
            optimizer.step()
        losses.append(total / len(batches))
    return {"losses": losses, "accuracy": accuracy(model), "parameters": flat(model.parameters())}


def train_alone(epochs: int = 3, lr: float = 0.01, momentum: float = 0.5) -> dict:
    """Train in this one process, on all digits, without any communication: the reference."""
    return train(0, 1, epochs, keep_gradients, lr, momentum)


def first_steps(
    rank: int, world_size: int, lr: float = 0.03, steps: int = 24, batches: int = 8
) -> list[float]:
    """Train one replica for some steps, again and again through the first few batches.

    A batch has 128 digits for all ranks together. Dropout is off, so that 1, 2, 4 and 8 ranks
    take the same course but for rounding. Returns this rank's loss in each step.
    """
    torch.manual_seed(SEED)
    model = Net().to(device()).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    images, labels = (part.split(GLOBAL_BATCH) for part in first_digits(GLOBAL_BATCH * batches))
    losses = []
    for step in range(steps):
        x, y = images[step % batches][rank::world_size], labels[step % batches][rank::world_size]
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        average_gradients_flat(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def explore(world_size: int = 4, lr: float = 0.03) -> Explorer:
    """Train for 24 steps and draw each rank's loss; `interact()` gives controls.

    Raises PoolError for what cannot be chosen.
    """
    from ddp_kit import plot  # ranks have no use for it
    from ddp_kit.notebook.explorer import Explorer, positive

    rates = positive("lr", lr, USUAL_RATES)
    return Explorer(
        "partitioned_sgd",
        {"world_size": world_size, "lr": lr},
        choices=lambda settings: {"world_size": range(1, max(8, world_size) + 1), "lr": rates},
        ask=lambda settings: (first_steps, settings["lr"]),
        draw=lambda result, settings: plot.losses(result, _title(settings), xlabel="step"),
    )


def _title(settings: dict) -> str:
    ranks = count(settings["world_size"], "rank")
    return f"The first steps of {ranks} with learning rate {settings['lr']:g}"


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the fraction of test digits that the model names rightly."""
    model.eval()
    images, labels = as_batch(mnist(train=False))
    right = (model(images).argmax(1) == labels).sum().item()
    model.train()
    return right / len(labels)


def flat(tensors) -> torch.Tensor:
    """Return one flat copy of many tensors, on the CPU."""
    return torch.cat([tensor.detach().view(-1) for tensor in tensors]).cpu()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference between two tensors of one shape."""
    return (one - other).abs().max().item()


def mean_gradient(
    rank: int,
    world_size: int,
    per_rank: int = 32,
    average: Callable[[nn.Module], None] = average_gradients,
) -> torch.Tensor:
    """Average the gradients of equal shards of one batch; return them flat.

    Dropout is off: it would draw other masks on other ranks.
    """
    torch.manual_seed(SEED)
    model = Net().to(device()).eval()
    images, labels = first_digits(per_rank * world_size)
    shard = slice(rank * per_rank, (rank + 1) * per_rank)
    F.nll_loss(model(images[shard]), labels[shard]).backward()
    average(model)
    return flat(parameter.grad for parameter in model.parameters())


def whole_batch_gradient(count: int) -> torch.Tensor:
    """Return the gradient of one batch of `count` digits, in this one process."""
    return mean_gradient(0, 1, per_rank=count, average=keep_gradients)


def distance_to_ddp(rank: int, world_size: int, steps: int = 20) -> float:
    """Train one replica by `average_gradients`, one by DDP; return the largest difference."""
    replicas = []
    for wrap, average in ((_plain, average_gradients), (_ddp, keep_gradients)):
        torch.manual_seed(SEED)
        model = wrap(Net().to(device()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        images, labels = first_digits(32 * world_size)
        for _ in range(steps):
            optimizer.zero_grad()
            F.nll_loss(model(images[rank::world_size]), labels[rank::world_size]).backward()
            average(model)
            optimizer.step()
        replicas.append(flat(model.parameters()))
    return distance(*replicas)


def _plain(model: nn.Module) -> nn.Module:
    return model


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


VARIANTS = {
    "no communication": (_plain, keep_gradients),
    "one all_reduce per parameter": (_plain, average_gradients),
    "one flat all_reduce": (_plain, average_gradients_flat),
    "DistributedDataParallel": (_ddp, keep_gradients),
}


def step_seconds(rank: int, world_size: int, steps: int = 30) -> dict[str, list[float]]:
    """Time one training step of each variant, in turn, so that noise meets all alike.

    Returns seconds per step for each name in VARIANTS, `steps` of them.
    """
    images, labels = first_digits(GLOBAL_BATCH)
    images, labels = images[rank::world_size], labels[rank::world_size]
    contestants = {}
    for name, (wrap, average) in VARIANTS.items():
        model = wrap(Net().to(device()))
        contestants[name] = model, torch.optim.SGD(model.parameters(), lr=0.01), average
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for step in range(steps + 3):
        for name, (model, optimizer, average) in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            average(model)
            optimizer.step()
            if step >= 3:  # the first steps warm up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def slowest(result) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank, step by step, from a run of `step_seconds`."""
    return {
        name: [max(step) for step in zip(*(rank[name] for rank in result), strict=True)]
        for name in result[0]
    }


def main(argv: list[str] | None = None) -> None:
    """Train, compare with one process and with DDP, print one line."""
    parser = lesson_parser("partitioned_sgd", __doc__)
    parser.add_argument("--epochs", type=int, default=1, help="passes over the digits (default 1)")
    options = parser.parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        reference = whole_batch_gradient(32 * n)
        for gradient in ranks(mean_gradient):
            error = distance(gradient, reference)
            prove("the mean of the shards' gradients is the batch's gradient", error < 1e-6)
        prove("average_gradients equals DDP", max(ranks(distance_to_ddp)) < 1e-6)
        replicas = list(ranks(train, options.epochs))
        same = all(torch.equal(r["parameters"], replicas[0]["parameters"]) for r in replicas)
        prove("all replicas are equal to the last bit", same)
        ranks.say(f"partitioned_sgd: {ranks}, replicas bit-equal, gradients equal one process")


if __name__ == "__main__":
    run_as_script(main)
