"""Graders of lesson 17: stages, orders and bubbles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.compared import alone, asked, compared, hunt
from ddp_kit.check.grader import Grader, same
from ddp_kit.check.record import Score, Span, record
from ddp_kit.errors import DeadlockError, RankError
from ddp_kit.lessons import pipeline_parallel as lesson

CASES = ((3, 4), (2, 3), (1, 2), (4, 8), (4, 2))  # ranks and micro-batches
INTERLEAVED = ((2, 2, 4), (3, 2, 6), (1, 2, 2), (4, 3, 8), (4, 2, 4))  # ranks, stages, as above
BUBBLES = ((4, 0.1), (8, 0.1), (4, 0.25), (2, 0.05), (16, 0.5), (5, 0.3), (2, 0.3), (1, 0.1))
WIDTH, SEQUENCES = 3, 2


@compared(
    "17.1",
    "one_f_one_b(rank, p, m)",
    "also with fewer micro-batches than ranks",
    where="on 1, 2, 3 and 4 ranks",
    cases=CASES,
    call=lambda p, m: f"one_f_one_b(rank, {p}, {m})",
    part=lambda case: f"{'fewer' if case[1] < case[0] else 'no fewer'} micro-batches than ranks",
    spare=None,
)
def _one_f_one_b(rank: int, p: int, one_f_one_b: Callable, m: int) -> dict:
    return {'the order (B3: ("B", 3))': _text(one_f_one_b(rank, p, m))}


def _text(order: Any) -> Any:
    """Return an order as "F0 F1 B0 B1", or with stages as "0F0 2F0", or as it is if it is none."""
    try:
        return " ".join(f"{''.join(map(str, stage))}{kind}{int(i)}" for kind, i, *stage in order)
    except (TypeError, ValueError):
        return order


RAISED = {
    "does not require grad": "no graph",
    "implicitly created only for scalar": "no gradient passed",
    "NoneType": "nothing to send",
    "torch.Tensor": "nothing to send",
}


def _stage(rank: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _data(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(2.0 * m * SEQUENCES * WIDTH).sin()
    inputs, targets = numbers.view(2, m, SEQUENCES, WIDTH)
    return inputs, targets


@compared(
    "17.2",
    "backward(stage, x, target, m)",
    where="on 1, 2, 3 and 4 ranks",
    on_failure={RankError: RAISED, DeadlockError: "not sent"},
    collectives=False,
    cases=((2, 2), (3, 4), (1, 2), (4, 3)),  # ranks and micro-batches
    call=lambda p, m: f"backward(stage, x, target, {m})",
    spare=None,
)
def _train(rank: int, world_size: int, backward: Callable, m: int) -> list[torch.Tensor]:
    """Run GPipe: the forwards keep the inputs, and the answer does each backward."""
    stage, kept = _stage(rank), []
    inputs, targets = _data(m)
    for x in inputs:
        x = x.clone()
        if rank > 0:
            dist.recv(x, src=rank - 1)
        kept.append(x)
        with torch.no_grad():
            y = stage(x)
        if rank < world_size - 1:
            dist.send(y, dst=rank + 1)
    for x, target in zip(kept, targets, strict=True):
        backward(stage, x, target, m)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in stage.parameters()]


def _rounding(p: int, most: float) -> str:
    exact = (p - 1) / most - (p - 1)
    needed = p == 1 or abs(exact - round(exact)) > 1e-9
    return "rounded up, and one rank" if needed else "where nothing is rounded"


asked("17.3", "micro_batches(p, most)", BUBBLES, _rounding, where="for 1 to 16 ranks")


@compared(
    "17.4",
    "interleaved(rank, p, v, m)",
    "with 2 and 3 stages each",
    where="on 1, 2, 3 and 4 ranks",
    cases=INTERLEAVED,
    call=lambda p, v, m: f"interleaved(rank, {p}, {v}, {m})",
    spare=None,
)
def _interleaved(rank: int, p: int, interleaved: Callable, v: int, m: int) -> dict:
    return {'the order (2B3: ("B", 3, 2))': _text(interleaved(rank, p, v, m))}


hunt("17.10")


@compared("17.a", "ForwardByHand(stage, width, loss_fn)")
def _forward(rank: int, world_size: int, by_hand: Callable) -> dict:
    stage = _first_or_other(rank)
    pipeline = by_hand(stage, WIDTH, _loss)
    order = _noted(pipeline, stage)
    for i in range(2):
        pipeline.forward(i, *_micro_batch(i), 0)
    pipeline.finish()
    inputs, outputs = zip(*(pipeline.held[i] for i in range(2)), strict=True)
    found = {
        "the inputs": [x.detach() for x in inputs],
        "the outputs": [y.detach() for y in outputs],
        "requires_grad of the inputs": [x.requires_grad for x in inputs],
        "requires_grad of the outputs": [y.requires_grad for y in outputs],
        "the order of its steps": order(),
        "the stages of its cells": [cell.stage for cell in pipeline.cells],
    }
    for y in outputs:
        if y.requires_grad:
            y.sum().backward()
    return found | {"whether a backward reaches the inputs": [x.grad is not None for x in inputs]}


@compared("17.b", "StageByHand(stage, width, loss_fn)")
def _backward_by_hand(rank: int, world_size: int, by_hand: Callable) -> dict:
    stage, last = _first_or_other(rank), world_size - 1
    pipeline = by_hand(stage, WIDTH, _loss)
    for i in range(2):
        tokens, targets = x, _ = _micro_batch(i)
        if rank > 0:
            x = pipeline.receive(tokens.shape, rank - 1).requires_grad_()
        y = stage(x)
        if rank < last:
            pipeline.send(y.detach(), rank + 1, i)
        pipeline.held[i] = x, _loss(y, targets) if rank == last else y
    order = _noted(pipeline, stage)
    returned = [pipeline.backward(i, 0) for i in (1, 0)]
    kept = sorted(pipeline.sending)
    pipeline.finish()
    return {
        "the gradients of its stage": [parameter.grad for parameter in stage.parameters()],
        "what it returned": returned,
        "the order of its steps": order(),
        "the stages of its cells": [cell.stage for cell in pipeline.cells],
        "the messages, (dst, micro-batch), that are not finished": kept,
    }


def _first_or_other(rank: int) -> nn.Module:
    """Return a stage: the first one has an embedding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        return nn.Linear(WIDTH, WIDTH) if rank else nn.Embedding(5, WIDTH)


def _micro_batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.tensor([[0, 1], [2, 3], [4, 0]])
    return (tokens + i) % 5, 1.0 + tokens + i


def _loss(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (y.sum(-1) - targets).square().mean() / 2


def _noted(pipeline: Any, stage: nn.Module) -> Callable[[], str]:
    """Return a function that says when the pipeline has received, computed and sent.

    What it did within a cell stands in brackets after the cell: "receive F0 (forward) send".
    """
    calls: list[tuple[float, str]] = []
    stage.register_forward_hook(lambda *_: calls.append((time.monotonic(), "forward")))
    weight = stage.get_parameter("weight")
    weight.register_hook(lambda _: calls.append((time.monotonic(), "backward")))

    def noted(name: str) -> Callable:
        method = getattr(pipeline, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            calls.append((time.monotonic(), name))
            return method(*args, **kwargs)

        return note

    pipeline.receive, pipeline.send = noted("receive"), noted("send")

    def order() -> str:
        steps = [(cell.start, f"{cell.kind}{cell.micro_batch}") for cell in pipeline.cells]
        for moment, name in calls:
            within = any(cell.start < moment < cell.end for cell in pipeline.cells)
            steps.append((moment, f"({name})" if within else name))
        return " ".join(step for _, step in sorted(steps))

    return order


def _cell(kind: str, i: int, start: float, end: float) -> lesson.Cell:
    return lesson.Cell(kind, i, start, end, 0)


@alone("17.c", "bubble(ranks)", "for both pictures")
def _bubble(bubble: Callable) -> dict:
    two = [[_cell("F", 0, 6, 7)], [_cell("F", 0, 5, 6), _cell("B", 0, 8, 10)]]
    three = [[_cell("F", 0, 0, 4)], [_cell("F", 0, 1, 3), _cell("B", 0, 3, 7)], []]
    return {"two ranks, from 5 to 10": bubble(two), "three ranks, one of them idle": bubble(three)}


ORDERS = {  # for 17.d
    "GPipe on two ranks": ["F0.0 F1.0 B0.0 B1.0", "F0.1 F1.1 B0.1 B1.1"],
    "1F1B on three ranks": [
        "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0",
        "F0.1 F1.1 B0.1 F2.1 B1.1 B2.1",
        "F0.2 B0.2 F1.2 B1.2 F2.2 B2.2",
    ],
    "two stages on each of two ranks": ["F0.0 F0.2 I0.2 W0.2 I0.0 W0.0", "F0.1 F0.3 B0.3 B0.1"],
}


@alone("17.d", "simulate(ranks)", "for all three orders")
def _simulate(simulate: Callable) -> dict:
    def steps(row: str) -> list[tuple[str, int, int]]:
        return [(step[0], int(step[1]), int(step[3])) for step in row.split()]

    found = {name: simulate([steps(row) for row in rows]) for name, rows in ORDERS.items()}
    return {name: [list(map(_timed, cells)) for cells in each] for name, each in found.items()}


def _timed(cell: Any) -> str:
    return f"{cell.kind}{cell.micro_batch} of stage {cell.stage} {cell.start:g}-{cell.end:g}"


class _Steps(list):
    """Steps that note in which of them the gradients of weights change."""

    def __init__(self, steps: list, modules: Iterable[nn.Module]) -> None:
        super().__init__(steps)
        self.weights = [module[0].weight for module in modules]
        self.changes: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        before = self._gradients()
        for kind, i, stage in super().__iter__():
            yield kind, i, stage
            if not same(before, after := self._gradients()):
                self.changes.append(f"{kind}{i} of stage {stage}")
            before = after

    def _gradients(self) -> list[torch.Tensor]:
        return [torch.zeros(1) if w.grad is None else w.grad.clone() for w in self.weights]


@compared("17.11", "run_steps(steps, stages, rank_of, inputs, loss_of)", kind="function")
def _run_steps(rank: int, world_size: int, run_steps: Callable) -> dict:
    rank_of = [*range(world_size), *reversed(range(world_size))]
    stages = {stage: _stage(stage) for stage, of in enumerate(rank_of) if of == rank}
    inputs, targets = _data(2)
    steps = _Steps(_v_order(rank, world_size), stages.values())
    run_steps(steps, stages, rank_of, inputs, lambda i, y: (y - targets[i]).square().mean() / 2)
    gradients = {s: [q.grad for q in module.parameters()] for s, module in stages.items()}
    return {"the gradients of its stages": gradients, "the steps that change them": steps.changes}


def _v_order(rank: int, p: int) -> list[tuple[str, int, int]]:
    """Return the steps of a rank with the stages `down` and `up`, for two micro-batches."""
    down, up = rank, 2 * p - 1 - rank
    middle = [("F", 1, down), ("I", 0, up)]
    if rank == p - 1:
        middle = [("I", 0, up), ("I", 0, down), ("F", 1, down)]
    order = [("F", 0, down), ("F", 0, up), *middle, ("W", 0, up), ("F", 1, up), ("I", 1, up)]
    left = [("I", 0, down), ("I", 1, down), ("W", 1, up), ("W", 0, down), ("W", 1, down)]
    return order + [step for step in left if step not in order]


RANKS, MICRO_BATCHES, MOST = 4, 8, 3  # of the record
KINDS = "FIW"


@record("17.12", "schedule()", "units of time", (40, 33, 31), along="time")
def _schedule(grader: Grader) -> Score:
    rows = _rows(grader, grader.ask())
    places = [{step: place for place, step in enumerate(row)} for row in rows]
    for rank, at in enumerate(places):
        for i in range(MICRO_BATCHES):
            for first, then in ("FI", "IW"):
                if at[first, i] > at[then, i]:
                    fact = f"rank {rank} has {then}{i} before {first}{i}"
                    grader.fail("wrong order", fact, hint="halves swapped")
    _check_held(grader, rows)
    steps = [[(kind, i, rank) for kind, i in row] for rank, row in enumerate(rows)]
    try:
        cells = [cell for row in lesson.simulate(steps) for cell in row]
    except ValueError as error:
        grader.fail(str(error), hint="never ends")
    spans = [Span(c.stage, int(c.start), int(c.end), f"{c.kind}{c.micro_batch}") for c in cells]
    return Score(max(span.end for span in spans), spans)


def _rows(grader: Grader, found: Any) -> list[list[tuple[str, int]]]:
    """Return the steps of each rank, or fail if some are missing."""
    try:
        rows = [[(str(kind), int(i)) for kind, i in row] for row in found]
    except (TypeError, ValueError):
        rows = []
    if len(rows) != RANKS:
        wanted = f"{RANKS} lists of steps such as ('F', 0)"
        grader.fail(f"it should return {wanted}", hint="other steps")
    wanted = sorted((kind, i) for kind in KINDS for i in range(MICRO_BATCHES))
    for rank, row in enumerate(rows):
        if sorted(row) != wanted:
            wrong = sorted({s for s in [*row, *wanted] if row.count(s) != (s in wanted)})
            shown = " ".join(f"{kind}{number}" for kind, number in wrong[:8])
            steps = f"{len(row)} steps; wrong: {shown}"
            grader.fail("wrong steps", f"rank {rank} has {steps}", hint="other steps")
    return rows


def _check_held(grader: Grader, rows: list[list[tuple[str, int]]]) -> None:
    for rank, row in enumerate(rows):
        held = 0
        for kind, i in row:
            held += (kind == "F") - (kind == "W")
            if held > MOST:
                fact = f"rank {rank} holds {held} micro-batches when it begins F{i}"
                grader.fail(f"more than {MOST} are held", fact, hint="too many held")
