"""Graders of lesson 03: gradients averaged by weight, and in flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

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
    _check_means(grader, True, digits, partial(_hints_for_weights, digits))
    gradients = sum(parameter.requires_grad for parameter in model(True).parameters())
    hint = "One all_reduce for each gradient and one for the number of digits are enough."
    _cost(grader, gradients + 1, hint, also=8)


@exercise(
    "3.2",
    "average_in_buckets(model, most)",
    "one all_reduce for each bucket",
    others=(SENT, SEPARATE),
)
def _average_in_buckets(grader: Grader, world_size: int) -> None:
    for most, buckets in ((100, 1), (10, 3), (1, 6)):
        case = f"average_in_buckets(model, most={most})"
        given = [most] * world_size
        grader.run(_average, False, given, world_size=world_size, case=case)
        _check_means(grader, False, [1] * world_size, hints_for_mean)
        _cost(grader, buckets, "One all_reduce for each bucket is enough.")
        reduced = grader.collectives()
        if len(reduced) < buckets and world_size > 1:
            calls = count(len(reduced), "all_reduce")
            grader.fail(
                f"right, but only {calls} for {count(buckets, 'bucket')}",
                part=SEPARATE,
                hint=f"A bucket holds at most {most} numbers, unless a single gradient is "
                "larger. Reduce each of `buckets` separately.",
            )


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
    grader: Grader, frozen: bool, weights: Sequence[int], hints_for: Callable[..., Mistakes]
) -> None:
    """Fail unless each gradient is the mean with these weights and the model is unchanged.

    hints_for: returns hints for a mean and the gradients of the ranks before.
    """
    result, n = grader.result, len(grader.result)
    past_frozen = False
    middle = sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
    for name, parameter in model(frozen).named_parameters():
        mean = _gradient(middle, parameter)
        found = [value["gradients"][name] for value in result]
        own = [_gradient(rank, parameter) for rank in range(n)]
        hints = {
            "The gradients before the frozen layer are right. Skip a parameter without a grad, and "
            "continue with the next.": past_frozen and same(own, found),
            **hints_for(mean, own),
        }
        grader.compare([mean] * n, found, hints, place=f" in {name}.grad")
        past_frozen = past_frozen or mean is None
    for rank, value in enumerate(result):
        if value["changed"]:
            fact = f"the gradients are right, but rank {rank} changed {value['changed'][0]}"
            hint = "Average the gradients only, and leave the parameters as they are."
            grader.fail(fact, hint=hint)


_OWN = (
    "Each rank still has its own gradient. all_reduce changes the tensor that you pass: pass the "
    "gradient itself, or copy the result back."
)
_NONE = {"Leave a parameter alone if its grad is None.": True}


def hints_for_mean(mean: Any, own: list) -> Mistakes:
    """Return hints on gradients that should be the mean of these."""
    n = len(own)
    if mean is None:
        return _NONE
    return {
        "That is the sum. Divide it by the world size in place: `a /= b` writes into `a`, but "
        "`a = a / b` makes a new tensor.": mean * n,
        f"That is the sum divided by {n * n}, but the world size is {n}.": mean / n,
        _OWN: own,
        "The mean is the sum over all ranks, divided by the world size, for every gradient.": True,
    }


def _hints_for_weights(digits: Sequence[int], mean: Any, own: list) -> Mistakes:
    """Return hints on gradients that should be the mean over all digits."""
    if mean is None:
        return _NONE
    n, total = len(own), sum(digits)
    return {
        _OWN: own,
        **{
            f"That is the {name}: it counts every rank alike. Weigh each gradient by the rank's "
            "share of the digits, before the all_reduce.": sum(own) / divisor
            for name, divisor in (("plain mean", n), ("sum", 1))
        },
        f"That is {total} times the mean: divide by the number of digits of all ranks.": (
            mean * total
        ),
        "The weights add up to 1: do not divide by the world size as well.": mean / n,
        "Each rank still has its own part of the mean: add them up with all_reduce.": (
            [one * d / total for one, d in zip(own, digits, strict=True)]
        ),
        "The mean over all digits is the sum of digits / total * gradient over the ranks.": True,
    }


def _cost(grader: Grader, calls: int, hint: str, also: int = 0) -> None:
    """Fail if the answer did more than reduce each gradient. also: bytes besides these."""
    reduced = grader.collectives()
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
        grader.fail(
            f"right, but all_reduce was called {len(reduced)} times where {calls} would be enough",
            hint=hint,
            part=SENT,
        )
