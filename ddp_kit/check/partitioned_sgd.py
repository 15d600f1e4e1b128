"""Graders of lesson 03: gradients averaged by weight and in buckets, and k-means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from ddp_kit.check.compared import compared, hunt
from ddp_kit.check.grader import SENT, Grader, Mistakes, exercise, name_counts, same
from ddp_kit.error_text import count

# Digits of each rank: their sums are powers of two, so the weights are exact.
DIGITS = {1: (4,), 2: (1, 3), 3: (1, 2, 5), 4: (9, 1, 4, 2), 5: (1, 8, 2, 4, 1)}
SEPARATE = "an all_reduce for each bucket"


@exercise(
    "3.1",
    "average_weighted(model, digits)",
    "with at most one all_reduce more than there are gradients",
    others=(SENT,),
)
def _average_weighted(grader: Grader, world_size: int) -> None:
    digits = DIGITS[world_size]
    case = f"average_weighted(model, digits) with {name_counts(digits)} digits"
    grader.run(_average, True, digits, world_size=world_size, case=case)
    _check_means(grader, True, digits, partial(_weighted_wrongly, digits))
    gradients = sum(parameter.requires_grad for parameter in model(True).parameters())
    _cost(grader, gradients + 1, also=8)


@exercise(
    "3.2",
    "average_in_buckets(model, most)",
    "one all_reduce for each bucket",
    others=(SENT, SEPARATE),
)
def _average_in_buckets(grader: Grader, world_size: int) -> None:
    for most, buckets in ((100, 1), (10, 3), (8, 4), (1, 6)):
        case = f"average_in_buckets(model, most={most})"
        given = [most] * world_size
        grader.run(_average, False, given, world_size=world_size, case=case)
        _check_means(grader, False, [1] * world_size, averaged_wrongly)
        _cost(grader, buckets)
        reduced = grader.collectives()
        if len(reduced) < buckets and world_size > 1:
            calls = count(len(reduced), "all_reduce")
            fact = f"right, but only {calls} for {count(buckets, 'bucket')}"
            grader.fail(fact, hint="too few calls", part=SEPARATE)


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
    """Return a gradient of a rank: means over 1 to 5 ranks are whole numbers."""
    if not parameter.requires_grad:
        return None
    return 60 * (rank + 1) + torch.arange(parameter.numel()).view_as(parameter).to(parameter.dtype)


def _average(
    rank: int, world_size: int, average: Callable, frozen: bool, given: Sequence[int]
) -> dict:
    """Call an answer with a model and what is given to this rank."""
    layers = model(frozen)
    for parameter in layers.parameters():
        parameter.grad = _gradient(rank, parameter)
    before = {name: parameter.clone() for name, parameter in layers.named_parameters()}
    average(layers, given[rank])
    parameters = dict(layers.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    changed = [name for name, held in parameters.items() if not torch.equal(held, before[name])]
    return {"gradients": gradients, "changed": changed}


def _check_means(
    grader: Grader, frozen: bool, weights: Sequence[int], mistakes_for: Callable[..., Mistakes]
) -> None:
    """Fail unless each gradient is the mean with these weights and the model is unchanged.

    mistakes_for: returns the mistakes for a mean and the gradients of the ranks before.
    """
    result, n = grader.result, len(grader.result)
    past_frozen = False
    middle = sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
    for name, parameter in model(frozen).named_parameters():
        mean = _gradient(middle, parameter)
        found = [value["gradients"][name] for value in result]
        own = [_gradient(rank, parameter) for rank in range(n)]
        stopped: Mistakes = {"stops at frozen layer": past_frozen and same(own, found)}
        others = {"frozen layer changed": True} if mean is None else mistakes_for(mean, own)
        grader.compare([mean] * n, found, {**stopped, **others}, place=f" in {name}.grad")
        past_frozen = past_frozen or mean is None
    for rank, value in enumerate(result):
        if value["changed"]:
            fact = f"the gradients are right, but rank {rank} changed {value['changed'][0]}"
            grader.fail(fact, hint="parameters changed")


def averaged_wrongly(mean: torch.Tensor, own: list[torch.Tensor]) -> Mistakes:
    return {
        "gradients not divided": mean * len(own),
        "gradients divided twice": mean / len(own),
        "gradients unchanged": own,
        "other gradients": True,
    }


def _weighted_wrongly(
    digits: Sequence[int], mean: torch.Tensor, own: list[torch.Tensor]
) -> Mistakes:
    """Return the mistakes in gradients that should be the mean over all digits."""
    added, total = sum(own[1:], own[0]), sum(digits)
    return {
        "gradients unchanged": own,
        "not weighted": (added / len(own), added),
        "not divided": mean * total,
        "divided twice": mean / len(own),
        "not added up": [one * d / total for one, d in zip(own, digits, strict=True)],
        "wrong weights": True,
    }


def _cost(grader: Grader, calls: int, also: int = 0) -> None:
    """Fail if the answer did more than reduce each gradient. also: bytes besides these."""
    hint, reduced = "too much sent", grader.collectives()
    if grader.result.trace.messages():
        grader.fail("right, but it sends messages", hint=hint, part=SENT)
    for event in reduced:
        if event.op != "all_reduce":
            grader.fail(f"right, but {event.op} was called", hint=hint, part=SENT)
    gradients = grader.result[0]["gradients"].values()
    nbytes = also + sum(4 * gradient.numel() for gradient in gradients if gradient is not None)
    grader.check_at_most(
        " in all_reduces by rank 0", sum(event.nbytes for event in reduced), nbytes, "byte", hint
    )
    if len(reduced) > calls:
        fact = f"all_reduce was called {len(reduced)} times where {calls} would be enough"
        grader.fail(f"right, but {fact}", hint=hint, part=SENT)


hunt("3.3")


POINTS = {2: (28, 12), 3: (24, 0, 16), 1: (40,), 4: (6, 0, 21, 13)}  # of each rank
STEPS = 3


@exercise(
    "3.4",
    "k_means(points, centroids, steps)",
    "with one all_reduce a step",
    kind="function",
    cases=POINTS,
    others=(SENT,),
    where="on 1, 2, 3 and 4 ranks",
)
def _k_means(grader: Grader, world_size: int) -> None:
    points, first = _points()
    own = points.split(POINTS[world_size])
    given = [(each.clone(), first.clone(), STEPS) for each in own]
    case = f"{grader.form} with {name_counts(POINTS[world_size])} points"
    without = "" if world_size < 3 else "no points"
    result = grader.run(
        _moved, given, world_size=world_size, case=case, failed=lambda error: without
    )
    found = [value["centroids"] for value in result]
    alone, together, means = [first] * world_size, [first], first
    for _ in range(STEPS):
        alone = [_step(each, last) for each, last in zip(own, alone, strict=True)]
        together.append(_step(points, together[-1]))
        means = torch.stack([_step(each, means) for each in own]).mean(dim=0)
    mistakes = {
        "each rank alone": world_size > 1 and same(alone, found),
        "mean of means": world_size > 1 and same([means] * world_size, found),
        "other steps": any(same([each] * world_size, found) for each in together[:-1]),
        "empty cluster": any(_moved_away(value, first[-1]) for value in found),
        "other centroids": True,
    }
    grader.compare([together[-1]] * world_size, found, mistakes, verb="return")
    for rank, value in enumerate(result):
        if value["changed"]:
            fact = f"right, but rank {rank} changed its {value['changed'][0]}"
            grader.fail(fact, hint="arguments changed")
    calls, hint = grader.collectives(), "too much travels"
    if grader.result.trace.messages():
        grader.fail("right, but it sends messages", hint=hint, part=SENT)
    if len(calls) > STEPS:
        fact = f"right, but {len(calls)} collectives were called in {STEPS} steps"
        grader.fail(fact, hint=hint, part=SENT)
    nbytes = 8 * STEPS * first.shape[0] * (first.shape[1] + 1)  # they may be float64
    grader.check_collectives(nbytes, hint)


def _points() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 40 points in order, and four centroids; the last one is far from all points."""
    random = torch.Generator().manual_seed(3)
    around = torch.tensor([[0.0, 0.0], [6.0, 0.0], [3.0, 5.0]])[torch.arange(40) % 3]
    points = around + 2 * torch.randn(40, 2, generator=random, dtype=torch.float32)
    first = torch.tensor([[-2.0, 4.0], [0.0, 5.0], [1.0, 6.0], [90.0, 90.0]])
    return points[points[:, 0].argsort()], first


def _step(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    nearest = torch.cdist(points, centroids).argmin(dim=1)
    groups = [points[nearest == number] for number in range(len(centroids))]
    moved = [g.mean(dim=0) if len(g) else c for g, c in zip(groups, centroids, strict=True)]
    return torch.stack(moved)


def _moved_away(found: object, empty: torch.Tensor) -> bool:
    """Return whether the centroid without points is no longer where it was."""
    return isinstance(found, torch.Tensor) and found.dim() > 0 and not same(empty, found[-1])


def _moved(rank: int, world_size: int, k_means: Callable, given: Sequence[tuple]) -> dict:
    points, centroids, steps = given[rank]
    before = points.clone(), centroids.clone()
    found = k_means(points, centroids, steps)
    names = {"points": (points, before[0]), "centroids": (centroids, before[1])}
    changed = [name for name, (now, then) in names.items() if not torch.equal(now, then)]
    return {"centroids": found, "changed": changed}


@compared("3.a", "DataPartitioner(data, sizes)")
def _partition(rank: int, world_size: int, partitioner: Callable) -> list[list[int]]:
    sizes = [2 / (world_size + 1), *[1 / (world_size + 1)] * (world_size - 1)]
    return partitioner(range(17), sizes).partitions


@compared("3.b", "average_gradients(model)")
def _average_gradients(rank: int, world_size: int, average: Callable) -> dict:
    layers = model(frozen=False)
    for parameter in layers.parameters():
        parameter.grad = _gradient(rank, parameter)
    average(layers)
    return {f"{name}.grad": one.grad for name, one in layers.named_parameters()}


compared("3.d", "average_gradients_flat(model)", "with one call")(_average_gradients)


@compared("3.c", "train_step(model, optimizer, images, labels)")
def _train_step(rank: int, world_size: int, train_step: Callable) -> dict:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    labels = torch.tensor([0, 1, 2])
    losses = [train_step(layer, optimizer, torch.rand(3, 4) + rank, labels) for _ in range(2)]
    return {"the losses": losses, **dict(layer.named_parameters())}
