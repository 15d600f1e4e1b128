"""Grader of lesson 15: a linear layer in ZeRO's stage 3, whose weight is gathered when needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_kit.check.grader import SIZES, Credit, Grader, brought, same
from ddp_kit.check.zero import own_rows
from ddp_kit.errors import RankError

OF_X, OF_ROWS, FREED = "the gradient of x", "the gradient of rows", "gathered only when needed"
OUTPUTS, INPUTS = 5, 3  # the weight has 5 rows, which few world sizes divide
BATCH = 4  # examples of a rank: no rank has as many rows


def exercise_15_3(sharded_linear: Callable[..., Any]) -> Credit:
    """Grade `sharded_linear(x, rows, gather, average)`, a layer in stage 3, on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    form = "sharded_linear(x, rows, gather, average)"
    hints = {RankError: _hint_for_product}
    grader = Grader("15.3", form, sharded_linear, hints, collectives=True)
    weight = torch.arange(1.0, OUTPUTS * INPUTS + 1).view(OUTPUTS, INPUTS)
    for n in grader.each(SIZES, OF_X, OF_ROWS, FREED):
        inputs, grads = brought(n, BATCH, INPUTS), [2 * grad for grad in brought(n, BATCH, OUTPUTS)]
        result = grader.run(_use_layer, weight, inputs, grads, world_size=n)
        _check_returned(grader, list(result))
        hint = "y = x @ W.T needs all rows of W: gather(rows) returns them."
        found = [each["y"] for each in result]
        grader.compare([x @ weight.T for x in inputs], found, hint, verb="return", place=" as y")
        wanted = [grad @ weight for grad in grads]
        found = [each["gradients"][0] for each in result]
        hint = _hint_for_x(wanted, found)
        grader.compare(wanted, found, hint, verb="return", place=f" as {OF_X}", part=OF_X)
        summands = [grad.T @ x for grad, x in zip(grads, inputs, strict=True)]
        found = [each["gradients"][1] for each in result]
        wanted = [own_rows(sum(summands) / n, rank, n) for rank in range(n)]
        hint = _hint_for_weight(summands, found)
        grader.compare(wanted, found, hint, verb="return", place=f" as {OF_ROWS}", part=OF_ROWS)
        _check_freed(grader, list(result))
    return grader.passed(
        "right on 1, 2, 3, 4 and 5 ranks, the whole weight is there only when needed"
    )


def _use_layer(
    rank: int,
    world_size: int,
    sharded_linear: Callable,
    weight: torch.Tensor,
    inputs: list[torch.Tensor],
    grads: list[torch.Tensor],
) -> dict[str, Any]:
    """Return what a layer returns, and how often it has gathered, and holds, the whole weight."""
    own, gathered = own_rows(weight, rank, world_size).clone(), []
    rows = -(-OUTPUTS // world_size)

    def gather(rows_of_rank: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros(rows, INPUTS) for _ in range(world_size)]
        padded = torch.zeros(rows, INPUTS)
        padded[: len(rows_of_rank)] = rows_of_rank
        dist.all_gather(parts, padded)
        memory = np.array(torch.cat(parts)[:OUTPUTS])  # lives as long as a tensor that uses it
        gathered.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    def average(gradient: torch.Tensor) -> torch.Tensor:
        if gradient.shape != weight.shape:
            raise ValueError(
                f"average expects a gradient of the whole weight, of shape {tuple(weight.shape)}, "
                f"got {tuple(gradient.shape)}"
            )
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return own_rows(total / world_size, rank, world_size).clone()

    def alive() -> int:
        return sum(memory() is not None for memory in gathered)

    returned = sharded_linear(inputs[rank].clone(), own, gather, average)
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
        return {"returned": repr(returned)}
    y, backward = returned
    del returned
    after_forward = len(gathered), alive()
    gradients = backward(grads[rank].clone())
    return {
        "y": y,
        "gradients": gradients,
        "after the forward": after_forward,
        "after the backward": (len(gathered), alive()),
    }


def _check_returned(grader: Grader, result: list[dict[str, Any]]) -> None:
    for each in result:
        if "returned" in each:
            hint = "Return the output and the function: `return y, backward`."
            grader.fail(f"it returns {each['returned']}", hint=hint)
        gradients = each["gradients"]
        if not isinstance(gradients, tuple | list) or len(gradients) != 2:
            hint = "Let `backward` return two tensors: the gradient of x, and that of rows."
            grader.fail(f"backward returns {gradients!r}", hint=hint)


def _hint_for_product(error: RankError) -> str:
    text = str(error)
    if "average expects" in text:
        return "The gradient of W has the shape of W: grad_y.T @ x."
    if "mat1 and mat2" in text or "must match the size" in text:
        return (
            "The shapes do not fit. This rank's rows are not the whole weight: call gather(rows) "
            "in the forward, and again in backward."
        )
    return ""


def _hint_for_x(wanted: list[torch.Tensor], found: list) -> str:
    if all(isinstance(have, torch.Tensor) and have.shape != (BATCH, INPUTS) for have in found):
        return "Return the gradient of x first, then that of rows."
    mean = sum(wanted) / len(wanted)
    if all(same(mean, have) for have in found):
        return (
            "That is the mean over the ranks. Each rank has its own x, so the gradient of x is "
            "this rank's alone."
        )
    return "The gradient of x is grad_y @ W, where W is gathered again."


def _hint_for_weight(summands: list[torch.Tensor], found: list) -> str:
    n = len(summands)
    if all(map(same, summands, found)):
        return (
            "That is the gradient of the whole weight, from this rank's x alone: average(...) "
            "returns the mean of this rank's rows."
        )
    if all(same(own_rows(own, r, n), found[r]) for r, own in enumerate(summands)):
        return "Those are rows of this rank's own gradient: average(...) adds up over the ranks."
    if all(same(own_rows(sum(summands), r, n), have) for r, have in enumerate(found)):
        return "That is the sum over the ranks, and should be the mean."
    return "The gradient of W is grad_y.T @ x; average(...) returns this rank's rows of the mean."


def _check_freed(grader: Grader, result: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(result):
        for moment, enough in (("after the forward", 1), ("after the backward", 2)):
            gathered, alive = each[moment]
            if alive:
                hint = (
                    "A function keeps the variables that it uses from outside. Call gather(rows) "
                    "inside backward, so that nothing refers to the first weight any more."
                )
                fact = f"right, but rank {rank} holds the whole weight {moment}"
                grader.fail(fact, hint=hint, part=FREED)
            if gathered > enough:
                fact = f"right, but rank {rank} has gathered {gathered} times {moment}"
                hint = "Gather once in the forward, and once in the backward."
                grader.fail(f"{fact} where {enough} would be enough", hint=hint, part=FREED)
