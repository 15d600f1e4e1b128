"""Graders of lesson 15: stage 1's step, own rows of gradients, a layer in stage 3, and bytes."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.compared import compared
from ddp_kit.check.grader import SENT, Grader, brought, exercise, hint_for, same
from ddp_kit.errors import DeadlockError, MismatchError, RankError

SHAPES = ((2, 3), (4,), (1, 2), (3,), (2,))  # of parameters: at least one for each rank
SECOND, STATES = "the second step", "no more states than needed"
STEPS = 2  # the second one needs the states of the first
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)


@exercise(
    "15.1",
    "make_step(owners, optimizer_cls)",
    "and each keeps the states of its own share",
    on_failure=dict.fromkeys((MismatchError, DeadlockError), "different broadcasts"),
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
        "not updated": [start] * n,
        "not sent": updated(lambda rank: rank),
        "sent by rank 0": updated(lambda rank: 0),
        "added up": [summed] * n,
        "wrong update": True,
    }
    second = {"states lost": [forgetful] * n, "wrong second step": True}
    for step, mistakes in enumerate((first, second)):
        found = [held[step] for held, _ in result]
        mistake, part = hint_for(found, mistakes), SECOND if step else ""
        for number, want in enumerate(wanted[step]):
            here = [held[number] for held in found]
            place = f" in parameter {number} after step {step + 1}"
            grader.compare([want] * n, here, mistake, place=place, part=part)
    for rank, (_, states) in enumerate(result):
        own = sum(p.numel() for p, owner in zip(start, owners, strict=True) if owner == rank)
        if states > own:
            grader.fail(
                f"right, but rank {rank} keeps {states} numbers as the optimizer's states "
                f"where {own} would be enough",
                part=STATES,
                hint="all parameters",
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


def _divides(case: tuple[int, int]) -> str:
    n, length = case
    return "rows that do not divide" if length % n else "rows that divide by the ranks"


@exercise(
    "15.2",
    "own_gradient(gradient)",
    "also where the rows do not divide",
    on_failure={
        RankError: dict.fromkeys(("size", "shape", "Shape", "tensor", "Tensor"), "unequal parts"),
        MismatchError: "unequal parts",
    },
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

    mistakes = {
        "not divided": of(total),
        "divided twice": of(total / n**2),
        "divided by rows": (total / rows / n, of(total / rows)),
        "own gradient only": (own, [each / n for each in own]),
        "whole mean": total / n,
        "zeros not cut off": list(filled.split(rows)),
        "rows of others": all(_in(have, total / n) or _in(have, total) for have in found),
        "not the mean": True,
    }
    grader.compare(of(total / n), found, mistakes, verb="return")
    grader.check_sent((n - 1) * rows * 2 * 4, "too many bytes")


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


@exercise(
    "15.3",
    "sharded_linear(x, rows, gather, average)",
    "the whole weight is there only when needed",
    on_failure={
        RankError: {
            "average expects": "wrong shape averaged",
            "mat1 and mat2": "own rows in backward",
            "must match the size": "own rows in backward",
        }
    },
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
        "own rows in forward",
        verb="return",
        place=" as y",
    )
    wanted = [grad @ weight for grad in grads]
    found = [each["gradients"][0] for each in result]
    tensors = [have for have in found if isinstance(have, torch.Tensor)]
    mistakes = {
        "other order": len(tensors) == n and all(have.shape != (BATCH, INPUTS) for have in tensors),
        "gradient of x averaged": sum(wanted) / n,
        "wrong gradient of x": True,
    }
    grader.compare(wanted, found, mistakes, verb="return", place=f" as {OF_X}", part=OF_X)
    summands = [grad.T @ x for grad, x in zip(grads, inputs, strict=True)]
    total = sum(summands)
    mistakes = {
        "not averaged": summands,
        "own gradient cut": [own_rows(own, rank, n) for rank, own in enumerate(summands)],
        "multiplied by the ranks": [own_rows(total, rank, n) for rank in range(n)],
        "wrong gradient of rows": True,
    }
    grader.compare(
        [own_rows(total / n, rank, n) for rank in range(n)],
        [each["gradients"][1] for each in result],
        mistakes,
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
            grader.fail(f"it returns {each['returned']}", hint="no function")
        gradients = each["gradients"]
        if not isinstance(gradients, tuple | list) or len(gradients) != 2:
            grader.fail(f"backward returns {gradients!r}", hint="one gradient")


def _check_freed(grader: Grader, result: Any) -> None:
    for rank, each in enumerate(result):
        for moment, enough in (("after the forward", 1), ("after the backward", 2)):
            gathered, alive = each[moment]
            if alive:
                fact = f"right, but rank {rank} holds the whole weight {moment}"
                grader.fail(fact, hint="weight kept", part=FREED)
            if gathered > enough:
                fact = f"right, but rank {rank} has gathered {gathered} times {moment}"
                fact = f"{fact} where {enough} would be enough"
                grader.fail(fact, hint="gathered too often", part=FREED)


# Of Adam's states, the gradient and the parameter. Stage s shards the first s of them.
BYTES = (8, 4, 4)
ROUNDS = (2, 3, 2, 3)  # how many times each stage sends (n-1)/n of a tensor for each parameter
# What mostly is left out of the bytes that each stage sends.
_LEFT_OUT = ("half the all_reduce", "no broadcasts", "no all_gather", "second gather")


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
        grader.fail(f"it returns {found!r}", hint="one number")
    if what == "bytes held":
        mistakes = {
            "nothing divided": stage > 0 and 16 * parameters,
            "everything divided": stage < 3 and 16 * parameters / n,
            "numbers counted": stage == 0 and 4 * parameters,
            "other bytes divided": True,
        }
        want = parameters * (sum(BYTES[:stage]) / n + sum(BYTES[stage:]))
        grader.expect(want, found[0], mistakes, f" {what}")
    else:
        times, part = ROUNDS[stage], (n - 1) / n
        mistakes = {
            "numbers counted": times * part * parameters,
            "own part sent": n > 1 and times * 4 * parameters,
            "all sent to all": times * (n - 1) * 4 * parameters,
            _LEFT_OUT[stage]: True,
        }
        grader.expect(times * part * 4 * parameters, found[1], mistakes, f" {what}")


SIZES_OF_GROUPS = (3, 8, 5, 13, 1), (4, 7, 2)  # numbers of each parameter, in two groups


@compared("15.a", "Owners()")
def _owners_of_groups(rank: int, world_size: int, owners_cls: Callable) -> dict:
    owners, found = owners_cls(), {}
    for number, sizes in enumerate(SIZES_OF_GROUPS, 1):
        group = [nn.Parameter(torch.zeros(size)) for size in sizes]
        mine = owners.assign(group)
        found[f"the owners of group {number}"] = [owners.of.get(each) for each in group]
        found[f"what is returned for group {number}"] = sorted(each.numel() for each in mine)
    return found | {"load": owners.load}


@compared("15.b", "ShardedGradient(full, rows, under_way)")
def _sharded_gradient(rank: int, world_size: int, sharded_cls: Callable) -> dict:
    whole = [nn.Parameter(torch.zeros(*shape)) for shape in ((5, 2), (4,), (3,))]
    rows = [nn.Parameter(torch.zeros(-(-len(p) // world_size), *p.shape[1:])) for p in whole]
    under_way: deque = deque()
    sharded = [sharded_cls(p, own, under_way) for p, own in zip(whole, rows, strict=True)]
    queued, kept = [], []
    for _ in range(2):
        for number, parameter in enumerate(whole):
            numbers = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
            (parameter * 6 * (rank + 1 + number) * numbers).sum().backward()
            queued.append([sharded.index(each) for each in under_way])
        kept += [parameter.grad is not None for parameter in whole]
        while under_way:
            under_way.popleft().finish_reduce()
    for forgotten in (each.reducing for each in sharded if each.reducing is not None):
        forgotten[-1].wait()
    gradients = {f"rows.grad of parameter {number}": own.grad for number, own in enumerate(rows)}
    return gradients | {"under_way": queued, "the whole gradients that are left": sum(kept)}


@compared("15.c", "UnshardedOnDemand(module)")
def _unsharded(rank: int, world_size: int, unsharded_cls: Callable) -> dict:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(1.0, parameter.numel() + 1).view_as(parameter))
    sharded = unsharded_cls(model)

    def complete(module: nn.Module) -> bool:
        return all(parameter.memory.nbytes() for parameter in sharded.own[module].values())

    def before_forward(module: nn.Module, _: Any) -> None:
        if not complete(module):  # the computation would read memory that is not there
            raise LookupError("a forward begins, and the full parameters have no memory")

    def before_backward(module: nn.Module) -> None:
        if not complete(module):
            raise BufferError("a backward begins, and the full parameters have no memory")

    def after_forward(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: before_backward(module))

    for layer in model:
        layer.register_forward_pre_hook(before_forward)  # runs after those of the answer
        layer.register_forward_hook(after_forward)
    output = sharded.module(torch.arange(6.0).view(2, 3) + rank)
    found = {
        "the output": output.detach(),
        "the layers in memory after the forward": [n for n in (0, 1) if complete(model[n])],
        "the numbers of parameters() after the forward": [p.numel() for p in sharded.parameters()],
    }
    output.sum().backward()
    while sharded.under_way:
        sharded.under_way.popleft().finish_reduce()
    return found | {"the gradients": [parameter.rows.grad for parameter in sharded.sharded]}


SAVED = {"up": (5, 3), "down": (3, 5), "norm": (4,)}
SAVED_BY = 4


@compared("15.10", "load_rows(shapes, saved_by, read)", kind="function")
def _load_rows(rank: int, world_size: int, load_rows: Callable) -> Mapping[str, Any]:
    total = sum(map(math.prod, SAVED.values()))
    per_file = -(-total // SAVED_BY)
    flat = torch.cat([torch.arange(1.0, total + 1), torch.zeros(SAVED_BY * per_file - total)])
    files, read_so_far = flat.split(per_file), 0

    def read(file: int, start: int, stop: int) -> torch.Tensor:
        nonlocal read_so_far
        if not (0 <= file < SAVED_BY and 0 <= start <= stop <= per_file):
            known = f"{SAVED_BY} files of {per_file} numbers"
            raise IndexError(f"there are {known}, and none has {start} to {stop} of file {file}")
        read_so_far += stop - start
        return files[file][start:stop].clone()

    loaded = load_rows(dict(SAVED), SAVED_BY, read)
    if not isinstance(loaded, dict):
        return {"what is returned": loaded}
    rows = {name: loaded.get(name) for name in SAVED}
    return rows | {"the count of numbers read": read_so_far}
