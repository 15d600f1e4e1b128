"""Graders of lesson 15: the three stages, FSDP2's layout, a layer without autograd, and bytes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.compared import compared
from ddp_kit.check.grader import SIZES

SHAPES = ((2, 3), (4,), (1, 2), (3,), (2,))  # of parameters: at least one for each rank
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).view(shape)


@compared(
    "15.1",
    "make_step(owners, optimizer_cls)",
    "and each keeps the states of its own share",
    sizes=SIZES,
)
def _make_step(rank: int, n: int, make_step: Callable) -> dict:
    parameters = [nn.Parameter(_numbers(*shape)) for shape in SHAPES]
    owners = {p: n - 1 - number % n for number, p in enumerate(parameters)}
    made: list[torch.optim.Optimizer] = []

    def optimizer_cls(params: Any) -> torch.optim.Optimizer:
        made.append(SGD(params))
        return made[-1]

    step, found = make_step(owners, optimizer_cls), {}
    for number in (1, 2):  # the second one needs the states of the first
        for parameter in parameters:
            parameter.grad = number / 4 * _numbers(*parameter.shape)
        step()
        now = [parameter.detach().clone() for parameter in parameters]
        found |= {f"parameter {place} after step {number}": p for place, p in enumerate(now)}
    states = [state for optimizer in made for state in optimizer.state.values()]
    kept = sum(value.numel() for state in states for value in state.values())
    return found | {"the count of numbers in the optimizer's states": kept}


@compared("15.2", "own_rows(gradients)", "in the layout of fully_shard")
def _own_rows(rank: int, n: int, own_rows: Callable) -> dict:
    gradients = [(rank + 1) * _numbers(*shape) for shape in ((6, 2), (6,), (12, 1, 2))]
    rows = own_rows(gradients)
    if not isinstance(rows, list | tuple) or len(rows) != len(gradients):
        return {"what is returned": rows}
    return {f"the rows of gradient {number}": each for number, each in enumerate(rows)}


@compared(
    "15.3",
    "sharded_linear(x, rows, gather, average)",
    "the whole weight is there only when needed",
    sizes=SIZES,
)
def _sharded_linear(rank: int, n: int, sharded_linear: Callable) -> Any:
    weight, x = _numbers(5, 3), 10 * (rank + 1) + _numbers(4, 3)  # few sizes divide 5 rows
    own, most, gathered = _rows_of_rank(weight, rank, n).clone(), -(-5 // n), []

    def gather(rows: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(most, 3)
        padded[: len(rows)] = rows
        parts = [torch.zeros(most, 3) for _ in range(n)]
        dist.all_gather(parts, padded)
        memory = np.array(torch.cat(parts)[:5])  # lives as long as a tensor that uses it
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
        return _rows_of_rank(total / n, rank, n).clone()

    def uses(moment: str) -> dict:
        alive = sum(memory() is not None for memory in gathered)
        return {f"whole weights in memory {moment}": alive, f"gathers {moment}": len(gathered)}

    returned = sharded_linear(x, own, gather, average)
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
        return returned
    y, backward = returned
    del returned
    forward = uses("after the forward")
    pair = backward(_numbers(4, 5) + rank)
    of_x, of_rows = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
    found = {"y": y, "the gradient of x": of_x, "the gradient of rows": of_rows}
    return found | forward | uses("after the backward")


def _rows_of_rank(whole: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    """Return the rows of a tensor that a rank has; the last ranks may have fewer, or none."""
    most = -(-len(whole) // n)
    return whole[rank * most :][:most]


HELD_SENT = ("bytes held", "bytes sent")


@compared(
    "15.4",
    "held_and_sent(stage, parameters, n, kinds)",
    sizes=(1,),
    where="for DDP and the three stages, in float32 and in mixed precision",
    cases=[(1, what) for what in HELD_SENT],
    part=lambda case: case[1],
)
def _held_and_sent(rank: int, _: int, held_and_sent: Callable, what: str) -> dict:
    values = {}
    for name, kinds in {"float32": (8, 4, 4), "mixed precision": (12, 2, 2)}.items():
        for stage, n in ((s, n) for n in (8, 1, 64) for s in range(4)):
            found = held_and_sent(stage, 1000, n, kinds)
            pair = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
            value = pair[HELD_SENT.index(what)]
            place = f"the {what} in stage {stage} on {n} ranks in {name}"
            values[place] = float(value) if isinstance(value, int | float) else value
    return values


class Block(nn.Module):
    """A layer whose first parameter gets its gradient first, before those of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.empty(3)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return three numbers for each row of x, which has three."""
        return self.linear(x) * self.scale


class Blocks(nn.Module):
    """Two blocks, and a layer after them, of known numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 2)
        for parameter in self.parameters():
            parameter.data = _numbers(*parameter.shape) / 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers for each row of x, which has three."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _left(parameters: Any) -> int:
    return sum(parameter.grad is not None for parameter in parameters)


# An all_reduce in place of the reduce_scatter sends 1.5 times as much in all.
@compared("15.a", "FlatParameter(parameters)", spare=1.25)
def _flat_parameter(rank: int, n: int, flat_cls: Callable) -> dict:
    parameters = [nn.Parameter(_numbers(*shape)) for shape in ((5, 2), (4,), (3,))]
    flat = flat_cls(parameters)
    for number, parameter in enumerate(parameters):
        parameter.grad = 6 * (rank + 1 + number) * parameter.detach()
    flat.reduce()
    left, gradient = _left(parameters), flat.shard.grad
    flat.shard.data.mul_(10)
    flat.gather()
    whole = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    found = {"shard.grad": gradient, "the parameters after the gather": whole}
    if isinstance(gradient, torch.Tensor):
        found["the bytes in the memory of shard.grad"] = gradient.untyped_storage().nbytes()
    return found | {"the whole gradients that are left": left}


@compared("15.b", "Stage2(model)")
def _stage_2(rank: int, n: int, stage_cls: Callable) -> dict:
    model = Blocks()
    training, left = stage_cls(model), []

    def before_backward(_: torch.Tensor) -> None:
        left.append(_left(model.blocks[1].parameters()))

    def after_forward(*given: Any) -> None:
        given[-1].register_hook(before_backward)

    model.blocks[0].register_forward_hook(after_forward)
    for step in range(2):
        for flat in training.flats:
            flat.shard.grad = None
        model(_numbers(2, 3) + rank + step).sum().backward()
    found = {f"shard.grad of flats[{i}]": f.shard.grad for i, f in enumerate(training.flats)}
    found["the whole gradients of blocks[1] when the backward of blocks[0] begins"] = left
    return found | {"the whole gradients that are left": _left(model.parameters())}


@compared("15.c", "Stage3(model)")
def _stage_3(rank: int, n: int, stage_cls: Callable) -> dict:
    model = Blocks()
    training, at_backwards = stage_cls(model), []

    def there() -> list[int]:
        memory = [flat.flat.untyped_storage().nbytes() for flat in training.flats]
        return [number for number, nbytes in enumerate(memory) if nbytes]

    def before_forward(number: int, *_: Any) -> None:
        if number not in there():  # the computation would read memory that is not there
            raise LookupError("a forward begins, and its flat parameter has no memory")

    def before_backward(number: int, _: Any) -> None:
        if number not in there():
            raise BufferError("a backward begins, and its flat parameter has no memory")
        at_backwards.append(there())

    def after_forward(number: int, *given: Any) -> None:
        given[-1].register_hook(partial(before_backward, number))

    for number, module in enumerate([model, *model.blocks]):
        module.register_forward_pre_hook(partial(before_forward, number))  # after the answer's
        module.register_forward_hook(partial(after_forward, number))
    found = {}
    for step in range(2):
        for flat in training.flats:
            flat.shard.grad = None
        output = model(_numbers(2, 3) + rank + step)
        found |= {"the output": output.detach(), "the flat parameters left by the forward": there()}
        output.sum().backward()
    found |= {f"shard.grad of flats[{i}]": f.shard.grad for i, f in enumerate(training.flats)}
    found["the flat parameters there when each backward begins"] = at_backwards
    return found | {"the flat parameters left by the backward": there()}


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
