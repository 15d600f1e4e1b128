"""Graders of lesson 03: gradients averaged by weight and in buckets, and k-means."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.compared import MANY, Used, compared, hunt, in_collectives
from ddp_kit.check.grader import SENT, SIZES, name_counts
from ddp_kit.trace import Trace

# Digits of each rank: their sums are powers of two, so the weights are exact.
DIGITS = {1: (4,), 2: (1, 3), 3: (1, 2, 5), 4: (9, 1, 4, 2), 5: (1, 8, 2, 4, 1)}
SEPARATE = "an all_reduce for each bucket"


@compared(
    "3.1",
    "average_weighted(model, digits)",
    "with at most one all_reduce more than there are gradients",
    sizes=SIZES,
    used=in_collectives,
    spare=1.08,  # the number of all digits may be an int64
    call=lambda n: f"average_weighted(model, digits) with {name_counts(DIGITS[n])} digits",
)
def _average_weighted(rank: int, n: int, average_weighted: Callable) -> dict:
    return _averaged(rank, average_weighted, model(frozen=True), DIGITS[n][rank])


def _buckets(trace: Trace, n: int, most: int) -> list[Used]:
    largest = max((event.nbytes for event in trace if event.kind == "collective"), default=0)
    return [*in_collectives(trace), Used("an all_reduce has {}", largest, part=SEPARATE)]


@compared(
    "3.2",
    "average_in_buckets(model, most)",
    "one all_reduce for each bucket",
    sizes=SIZES,
    cases=[(n, most) for n in SIZES for most in (100, 10, 8, 1)],
    others=(SENT, SEPARATE),
    used=_buckets,
    spare=1,
    call=lambda n, most: f"average_in_buckets(model, most={most})",
)
def _average_in_buckets(rank: int, n: int, average_in_buckets: Callable, most: int) -> dict:
    return _averaged(rank, average_in_buckets, model(frozen=False), most)


def model(frozen: bool) -> nn.Sequential:
    """Return a small model; if `frozen`, its middle layer needs no gradient."""
    layers = small_layers(3, 2, 4, 1)
    layers[1].requires_grad_(not frozen)
    return layers


def small_layers(*sizes: int) -> nn.Sequential:
    """Return float32 layers from each size to the next; the random state is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        shapes = pairwise(sizes)
        return nn.Sequential(*(nn.Linear(*shape, dtype=torch.float32) for shape in shapes))


def _gradient(rank: float, parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a gradient of a rank. Means over 1 to 5 ranks are exact, and no whole numbers."""
    if not parameter.requires_grad:
        return None
    counted = torch.arange(parameter.numel()).view_as(parameter).to(parameter.dtype)
    return 60 * (rank + 1) + counted + 0.5


def _averaged(rank: int, average: Callable, layers: nn.Module, *given: int) -> dict:
    """Call an answer with a model and what is given to this rank."""
    for parameter in layers.parameters():
        parameter.grad = _gradient(rank, parameter)
    before = {name: held.detach().clone() for name, held in layers.named_parameters()}
    average(layers, *given)
    parameters = dict(layers.named_parameters())
    gradients = {f"{name}.grad": parameter.grad for name, parameter in parameters.items()}
    changes = {name: (held - before[name]).detach() for name, held in parameters.items()}
    return gradients | {f"the change of {name}": change for name, change in changes.items()}


hunt("3.3")


POINTS = {2: (28, 12), 3: (24, 0, 16), 1: (40,), 4: (6, 0, 21, 13)}  # of each rank


@compared(
    "3.4",
    "k_means(points, centroids, steps)",
    "with one all_reduce a step",
    kind="function",
    sizes=tuple(POINTS),
    used=in_collectives,
    spare=2,  # in float64
    call=lambda n: f"k_means(points, centroids, steps) with {name_counts(POINTS[n])} points",
)
def _k_means(rank: int, n: int, k_means: Callable) -> dict:
    points, centroids = _points()
    points = points.split(POINTS[n])[rank].clone()
    found = {"what is returned": k_means(points, centroids, 3)}
    return found | {"points": points, "centroids": centroids}


def _points() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 40 points in order, and four centroids; the last one is far from all points."""
    random = torch.Generator().manual_seed(3)
    around = torch.tensor([[0.0, 0.0], [6.0, 0.0], [3.0, 5.0]])[torch.arange(40) % 3]
    points = around + 2 * torch.randn(40, 2, generator=random, dtype=torch.float32)
    first = torch.tensor([[-2.0, 4.0], [0.0, 5.0], [1.0, 6.0], [90.0, 90.0]])
    return points[points[:, 0].argsort()], first


DATA = range(100, 117)  # no item is its own position


def _sizes(n: int) -> list[float]:
    return [2 / (n + 1), *[1 / (n + 1)] * (n - 1)]


@compared(
    "3.a",
    "DataPartitioner(data, sizes)",
    call=lambda n: f"DataPartitioner({DATA}, [{', '.join(f'{size:.2f}' for size in _sizes(n))}])",
)
def _partition(rank: int, world_size: int, partitioner: Callable) -> dict:
    return {"partitions": partitioner(DATA, _sizes(world_size)).partitions}


@compared("3.b", "average_gradients(model)", spare=MANY)
def _average_gradients(rank: int, world_size: int, average: Callable) -> dict:
    return _averaged(rank, average, model(frozen=False))


compared("3.d", "average_gradients_flat(model)", "with one call", used=in_collectives, spare=MANY)(
    _average_gradients
)


def _add_up(model: nn.Module) -> None:
    """Do something else than the lesson's `average_gradients`: which of the two was called?"""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@compared("3.c", "train_step(model, optimizer, images, labels, average)", spare=MANY)
def _train_step(rank: int, world_size: int, train_step: Callable) -> dict:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    labels = torch.tensor([0, 1, 2])
    images = [torch.rand(3, 4) + rank for _ in range(2)]
    losses = [train_step(layer, optimizer, each, labels, _add_up) for each in images]
    return {"the losses": losses, **dict(layer.named_parameters())}
