"""Graders of lesson 15: stage 1's step, own rows of gradients, a layer in stage 3, and bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.grader import SENT, Grader, brought, exercise, hint_for, same
from ddp_kit.errors import DeadlockError, MismatchError, RankError

SHAPES = ((2, 3), (4,), (1, 2), (3,), (2,))  # of parameters: at least one for each rank
SECOND, STATES = "the second step", "no more states than needed"
STEPS = 2  # the second one needs the states of the first
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
_SAME_CALLS = (
    "All ranks must call the same broadcasts in the same order: go through all parameters on every "
    "rank. `src` is the owner of the parameter, whichever rank calls."
)


@exercise(
    "15.1",
    "make_step(owners, optimizer_cls)",
    "and each keeps the states of its own share",
    on_failure={MismatchError: _SAME_CALLS, DeadlockError: _SAME_CALLS},
    others=(SECOND, STATES),
)
def _make_step(grader: Grader, n: int) -> None:
    start, wanted = [p.detach() for p in _parameters()], _alone(SGD)
    forgetful = _alone(SGD, forget=True)[1]
    result = grader.run(_take_steps, world_size=n)
    owners = _owners(n)

    def updated(rank_of: Callable[[int], int]) -> list:
        """Return what all ranks hold if each has updated the parameters of one rank only."""
        every = list(zip(start, wanted[0], owners, strict=True))
        return [
            [new if owner == rank_of(rank) else old for old, new, owner in every]
            for rank in range(n)
        ]

    summed = [(n - 1) * old + new for old, new in zip(start, wanted[0], strict=True)]
    first = {
        "Nothing has changed: call the optimizer's step().": [start] * n,
        "Each rank has updated its own parameters and lacks the others': after the optimizer's "
        "step, broadcast each parameter from its owner.": updated(lambda rank: rank),
        "All ranks have what rank 0 has, which has updated its own parameters only. Each "
        "parameter comes from its owner: src=owners[parameter].": updated(lambda rank: 0),
        "That is the sum over the ranks. A broadcast copies what the owner has.": [summed] * n,
        "Let the optimizer update this rank's own parameters, with the gradients as they are: "
        "they are means already. Then broadcast each parameter from its owner.": True,
    }
    second = {
        "The second step began without the states of the first one. Make the optimizer once, "
        "before `def step`.": [forgetful] * n,
        "The first step is right. The second needs the same optimizer, with its states.": True,
    }
    for step, hints in enumerate((first, second)):
        found = [held[step] for held, _ in result]
        hint, part = hint_for(found, hints), SECOND if step else ""
        for number, want in enumerate(wanted[step]):
            here = [held[number] for held in found]
            place = f" in parameter {number} after step {step + 1}"
            grader.compare([want] * n, here, hint, place=place, part=part)
    for rank, (_, states) in enumerate(result):
        own = sum(p.numel() for p, owner in zip(start, owners, strict=True) if owner == rank)
        if states > own:
            grader.fail(
                f"right, but rank {rank} keeps {states} numbers as the optimizer's states "
                f"where {own} would be enough",
                part=STATES,
                hint="Give the optimizer only the parameters that this rank owns.",
            )


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in _tensors(1.0)]


def _tensors(factor: float) -> list[torch.Tensor]:
    """Return a tensor of each shape; no two numbers of one tensor are the same."""
    return [
        factor * (10 * number + torch.arange(1.0, torch.Size(shape).numel() + 1)).view(shape)
        for number, shape in enumerate(SHAPES)
    ]


def _owners(n: int) -> list[int]:
    """Return the rank of each parameter, the last ranks first."""
    return [n - 1 - number % n for number in range(len(SHAPES))]


def _steps(parameters: list[nn.Parameter], step_once: Callable[[], Any]) -> list[list]:
    """Take all steps, with the same gradients on all ranks; return the parameters after each."""
    held = []
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, _tensors(0.25 * (step + 1)), strict=True):
            parameter.grad = gradient
        step_once()
        held.append([parameter.detach().clone() for parameter in parameters])
    return held


def _alone(optimizer_cls: Callable, forget: bool = False) -> list[list[torch.Tensor]]:
    """Return all parameters after each step of one process.

    forget: make the optimizer anew before each step.
    """
    parameters = _parameters()
    optimizer = optimizer_cls(parameters)
    return _steps(parameters, lambda: (optimizer_cls(parameters) if forget else optimizer).step())


def _take_steps(rank: int, world_size: int, make_step: Callable) -> tuple[list[list], int]:
    """Return this rank's parameters after each step, and how many numbers its states have."""
    parameters, made = _parameters(), []

    def optimizer_cls(params: Any) -> torch.optim.Optimizer:
        made.append(SGD(params))
        return made[-1]

    step_once = make_step(dict(zip(parameters, _owners(world_size), strict=True)), optimizer_cls)
    held = _steps(parameters, step_once)
    states = [state for optimizer in made for state in optimizer.state.values()]
    return held, sum(value.numel() for state in states for value in state.values())


_FILL_UP = (
    "reduce_scatter needs parts of equal shape: append rows of zeros, so that every rank has "
    "`rows` of them."
)


def _hint_for_shapes(error: RankError) -> str:
    words = ("size", "shape", "tensor")
    return _FILL_UP if any(word in str(error).lower() for word in words) else ""


def _divides(case: tuple[int, int]) -> str:
    n, length = case
    return "rows that do not divide" if length % n else "rows that divide by the ranks"


@exercise(
    "15.2",
    "own_gradient(gradient)",
    "also where the rows do not divide",
    on_failure={RankError: _hint_for_shapes, MismatchError: _FILL_UP},
    cases=((2, 4), (2, 5), (3, 5), (1, 5), (4, 5), (5, 5)),
    others=(SENT,),
    part=_divides,
)
def _own_gradient(grader: Grader, n: int, length: int) -> None:
    gradients = brought(n, length, 2)
    rows = -(-length // n)
    case = f"own_gradient(gradient of {length} rows)"
    found = grader.call([(gradient,) for gradient in gradients], case)
    total = sum(gradients)
    filled = torch.cat([total / n, total.new_zeros(n * rows - length, 2)])
    own = [own_rows(gradient, rank, n) for rank, gradient in enumerate(gradients)]

    def of(whole: torch.Tensor) -> list[torch.Tensor]:
        return [own_rows(whole, rank, n) for rank in range(n)]

    hints = {
        "That is the sum over the ranks: divide by the number of ranks.": of(total),
        "That is divided by the number of ranks twice.": of(total / n**2),
        "Divide by the number of ranks, not of rows.": (total / rows / n, of(total / rows)),
        "Those are rows of this rank's own gradient: add up over the ranks, too.": (
            own,
            [each / n for each in own],
        ),
        "That is the whole mean on every rank. Each should return its own rows.": total / n,
        "The rows of zeros that fill up the last parts are no rows of the gradient: cut "
        "them off before you return.": list(filled.split(rows)),
        f"These are rows, but not the right ones. Rank r has {rows} of them, from row "
        f"{rows}r on, and the last ranks may have fewer.": all(
            _in(have, total / n) or _in(have, total) for have in found
        ),
        "Fill up with zeros, divide by the number of ranks, pass this to reduce_scatter, and "
        "return the rows that are not filled up.": True,
    }
    grader.compare(of(total / n), found, hints, verb="return")
    grader.check_sent(
        (n - 1) * rows * 2 * 4,
        "Each rank needs its own rows of the sum only: reduce_scatter adds up and deals out. "
        "An all_reduce sends twice as much.",
    )


def _in(have: Any, whole: torch.Tensor) -> bool:
    """Return whether each row of a tensor is somewhere in the whole, or zero."""
    if not isinstance(have, torch.Tensor) or have.shape[1:] != whole.shape[1:]:
        return False
    return all(not row.any() or any(map(partial(same, row), whole)) for row in have)


def own_rows(whole: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    """Return the rows of a tensor that a rank has; the last ranks may have fewer, or none."""
    rows = -(-len(whole) // n)
    return whole[rank * rows : (rank + 1) * rows]


OF_X, OF_ROWS, FREED = "the gradient of x", "the gradient of rows", "gathered only when needed"
OUTPUTS, INPUTS = 5, 3  # the weight has 5 rows, which few world sizes divide
BATCH = 4  # examples of a rank: no rank has as many rows


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


@exercise(
    "15.3",
    "sharded_linear(x, rows, gather, average)",
    "the whole weight is there only when needed",
    on_failure={RankError: _hint_for_product},
    others=(OF_X, OF_ROWS, FREED),
)
def _sharded_linear(grader: Grader, n: int) -> None:
    weight = torch.arange(1.0, OUTPUTS * INPUTS + 1).view(OUTPUTS, INPUTS)
    inputs, grads = brought(n, BATCH, INPUTS), [2 * grad for grad in brought(n, BATCH, OUTPUTS)]
    result = grader.run(_use_layer, weight, inputs, grads, world_size=n)
    _check_returned(grader, result)
    grader.compare(
        [x @ weight.T for x in inputs],
        [each["y"] for each in result],
        "y = x @ W.T needs all rows of W: gather(rows) returns them.",
        verb="return",
        place=" as y",
    )
    wanted = [grad @ weight for grad in grads]
    found = [each["gradients"][0] for each in result]
    tensors = [have for have in found if isinstance(have, torch.Tensor)]
    hints = {
        "Return the gradient of x first, then that of rows.": len(tensors) == n
        and all(have.shape != (BATCH, INPUTS) for have in tensors),
        "That is the mean over the ranks. Each rank has its own x, so the gradient of x is "
        "this rank's alone.": sum(wanted) / n,
        "The gradient of x is grad_y @ W, where W is gathered again.": True,
    }
    grader.compare(wanted, found, hints, verb="return", place=f" as {OF_X}", part=OF_X)
    summands = [grad.T @ x for grad, x in zip(grads, inputs, strict=True)]
    total = sum(summands)
    hints = {
        "That is the gradient of the whole weight, from this rank's x alone: average(...) "
        "returns the mean of this rank's rows.": summands,
        "Those are rows of this rank's own gradient: average(...) adds up over the ranks.": [
            own_rows(own, rank, n) for rank, own in enumerate(summands)
        ],
        "That is the sum over the ranks, and should be the mean.": [
            own_rows(total, rank, n) for rank in range(n)
        ],
        "The gradient of W is grad_y.T @ x; average(...) returns this rank's rows of the "
        "mean.": True,
    }
    grader.compare(
        [own_rows(total / n, rank, n) for rank in range(n)],
        [each["gradients"][1] for each in result],
        hints,
        verb="return",
        place=f" as {OF_ROWS}",
        part=OF_ROWS,
    )
    _check_freed(grader, result)


def _use_layer(
    rank: int, world_size: int, sharded_linear: Callable, weight: Any, inputs: list, grads: list
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

    def uses() -> tuple[int, int]:
        return len(gathered), sum(memory() is not None for memory in gathered)

    returned = sharded_linear(inputs[rank].clone(), own, gather, average)
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
        return {"returned": repr(returned)}
    y, backward = returned
    del returned
    found = {"y": y, "after the forward": uses()}
    found["gradients"] = backward(grads[rank].clone())
    return found | {"after the backward": uses()}


def _check_returned(grader: Grader, result: Any) -> None:
    for each in result:
        if "returned" in each:
            hint = "Return the output and the function: `return y, backward`."
            grader.fail(f"it returns {each['returned']}", hint=hint)
        gradients = each["gradients"]
        if not isinstance(gradients, tuple | list) or len(gradients) != 2:
            hint = "Let `backward` return two tensors: the gradient of x, and that of rows."
            grader.fail(f"backward returns {gradients!r}", hint=hint)


def _check_freed(grader: Grader, result: Any) -> None:
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


KINDS = ("Adam's states", "the gradients", "the parameters")
BYTES = (8, 4, 4)  # of each kind, for one parameter; stage s shards the first s of them
ROUNDS = (2, 3, 2, 3)  # how many times each stage sends (n-1)/n of a tensor for each parameter
_SENT = (
    "DDP sends an all_reduce of the gradients, which counts twice.",
    "Stage 1 sends DDP's all_reduce, which counts twice, and broadcasts of all parameters.",
    "Stage 2 sends a reduce_scatter of the gradients, and an all_gather of the parameters.",
    "Stage 3 gathers the parameters before the forward and again before the backward, and "
    "reduces and scatters the gradients.",
)


@exercise(
    "15.4",
    "held_and_sent(stage, parameters, n)",
    where="for DDP and the three stages, on 1, 8 and 64 ranks",
    cases=[
        (stage, 1000, n, what)
        for n in (8, 1, 64)
        for stage in (0, 1, 2, 3)
        for what in ("bytes held", "bytes sent")
    ],
    part=lambda case: case[3],
)
def _held_and_sent(grader: Grader, stage: int, parameters: int, n: int, what: str) -> None:
    found = grader.ask(stage, parameters, n)
    if not isinstance(found, tuple | list) or len(found) != 2:
        grader.fail(f"it returns {found!r}", hint="Return both: `return held, sent`.")
    numbers = "That counts numbers, and float32 has 4 bytes."
    if what == "bytes held":
        sharded, kept = ", ".join(KINDS[:stage]), ", ".join(KINDS[stage:])
        hints = {
            f"That is all of it. Stage {stage} shards {sharded}: divide by n.": (
                stage > 0 and 16 * parameters
            ),
            f"Not everything is sharded: in stage {stage}, every rank keeps {kept}.": (
                stage < 3 and 16 * parameters / n
            ),
            numbers: stage == 0 and 4 * parameters,
            "Adam needs 8 bytes for each parameter; the gradient and the parameter take 4 "
            f"each. Stage {stage} divides {sharded or 'nothing'} by n.": True,
        }
        grader.expect(
            parameters * (sum(BYTES[:stage]) / n + sum(BYTES[stage:])), found[0], hints, f" {what}"
        )
    else:
        part, ring = 4 * parameters, "A rank sends (n-1)/n of a tensor in a ring"
        hints = {
            numbers: ROUNDS[stage] * (n - 1) / n * parameters,
            f"{ring}: its own part stays where it is.": n > 1 and ROUNDS[stage] * part,
            f"{ring}, not n-1 times the tensor.": ROUNDS[stage] * (n - 1) * part,
            _SENT[stage]: True,
        }
        grader.expect(ROUNDS[stage] * (n - 1) / n * part, found[1], hints, f" {what}")
