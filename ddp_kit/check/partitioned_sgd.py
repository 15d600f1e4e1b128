"""Graders of lesson 03: averaged gradients, one by one and in flat buckets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ddp_kit.check.grader import SIZES, Grader, same
from ddp_kit.error_text import count


def exercise_3_1(average_gradients: Callable[[nn.Module], Any]) -> None:
    """Grade `average_gradients(model)` on 1 to 5 ranks; one layer of the model is frozen.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("3.1", "average_gradients(model)", average_gradients, collectives=True)
    for world_size in SIZES:
        grader.run(_average, True, world_size=world_size)
        check_means(grader, True)
        gradients = sum(parameter.requires_grad for parameter in model(True).parameters())
        _cost(grader, gradients, "One all_reduce for each gradient is enough.")
    grader.passed("right on 1, 2, 3, 4 and 5 ranks, no more than one all_reduce for each gradient")


def exercise_3_2(average_in_buckets: Callable[[nn.Module, int], Any]) -> None:
    """Grade `average_in_buckets(model, most)` on 1 to 5 ranks and three sizes of bucket.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("3.2", "average_in_buckets(model, most)", average_in_buckets, collectives=True)
    for world_size in SIZES:
        for most, buckets in ((100, 1), (10, 3), (1, 6)):
            case = f"average_in_buckets(model, most={most})"
            grader.run(_average, False, most, world_size=world_size, case=case)
            check_means(grader, False)
            _cost(grader, buckets, "One all_reduce for each bucket is enough.")
            reduced = grader.collectives()
            if len(reduced) < buckets and world_size > 1:
                calls = count(len(reduced), "all_reduce")
                grader.fail(
                    f"right, but only {calls} for {count(buckets, 'bucket')}",
                    hint=f"A bucket holds at most {most} numbers, unless a single gradient is "
                    "larger. Reduce each of `buckets` separately.",
                )
    grader.passed("right on 1, 2, 3, 4 and 5 ranks, one all_reduce for each bucket")


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


def _average(rank: int, world_size: int, average: Callable, frozen: bool, *most: int) -> dict:
    layers = model(frozen)
    for parameter in layers.parameters():
        parameter.grad = _gradient(rank, parameter)
    before = {name: parameter.clone() for name, parameter in layers.named_parameters()}
    average(layers, *most)
    parameters = dict(layers.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    changed = [name for name, held in parameters.items() if not torch.equal(held, before[name])]
    return {"gradients": gradients, "changed": changed}


def check_means(grader: Grader, frozen: bool) -> None:
    """Fail unless each gradient is the mean and the model is unchanged."""
    result, n = grader.result, len(grader.result)
    past_frozen = False
    for name, parameter in model(frozen).named_parameters():
        mean = _gradient((n - 1) / 2, parameter)
        found = [value["gradients"][name] for value in result]
        own = [_gradient(rank, parameter) for rank in range(n)]
        hint = hint_for_mean(mean, found, own)
        if past_frozen and all(map(same, own, found)):
            hint = "The ones before it are right. Skip a parameter without a grad, then continue."
        grader.compare([mean] * n, found, hint, place=f" in {name}.grad")
        past_frozen = past_frozen or mean is None
    for rank, value in enumerate(result):
        if value["changed"]:
            grader.fail(
                f"the gradients are right, but rank {rank} changed {value['changed'][0]}",
                hint="Average the gradients only, and leave the parameters as they are.",
            )


def hint_for_mean(mean: Any, found: list, own: list) -> str:
    """Return a hint on why these gradients are not the mean."""
    n = len(found)
    if mean is None:
        return "Leave a parameter alone if its grad is None."
    if all(same(mean * n, have) for have in found):
        return (
            "That is the sum. Divide it by the world size in place: `a /= b` writes into `a`, but "
            "`a = a / b` makes a new tensor."
        )
    if all(same(mean / n, have) for have in found):
        return f"That is the sum divided by {n * n}, but the world size is {n}."
    if all(map(same, own, found)):
        return (
            "Each rank still has its own gradient. all_reduce changes the tensor that you pass: "
            "pass the gradient itself, or copy the result back."
        )
    return "The mean is the sum over all ranks, divided by the world size, for every gradient."


def _cost(grader: Grader, calls: int, hint: str) -> None:
    reduced = grader.collectives()
    if grader.result.trace.messages():
        grader.fail("right, but it sends messages", hint=hint)
    for event in reduced:
        if event.op != "all_reduce":
            grader.fail(f"right, but {event.op} was called", hint=hint)
    gradients = grader.result[0]["gradients"].values()
    nbytes = sum(4 * gradient.numel() for gradient in gradients if gradient is not None)
    grader.check_at_most(
        " in all_reduces by rank 0", sum(event.nbytes for event in reduced), nbytes, "byte", hint
    )
    if len(reduced) > calls:
        grader.fail(
            f"right, but all_reduce was called {len(reduced)} times where {calls} would be enough",
            hint=hint,
        )
