"""The order of the forwards and backwards in a pipeline, how long it takes, and its bubble."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

Action = tuple[str, int]  # ("F", 3) is the forward of micro-batch 3, ("B", 3) its backward
Step = tuple[str, int, int]  # an action, and its stage
LASTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # how long each lasts, in forwards
BY_HAND: dict[str, Callable[[int, int, int], int]] = {  # how many micro-batches a rank may hold
    "GPipe": lambda rank, p, m: m,
    "1F1B": lambda rank, p, m: p - rank,
}


class Cell(NamedTuple):
    """What a rank has computed for one micro-batch.

    kind: "F", forward; "B", backward; or its halves, "I", the gradient of the stage's input, and
    "W", those of the weights. start, end: in seconds since the step began.
    """

    kind: str
    micro_batch: int
    start: float
    end: float
    stage: int


@contextmanager
def cell(cells: list[Cell], kind: str, i: int, stage: int, wait: float) -> Iterator[None]:
    """Record this block as a cell, with `wait` seconds added for a forward."""
    start = time.monotonic()
    time.sleep(LASTS[kind] * wait)
    yield
    cells.append(Cell(kind, i, start, time.monotonic(), stage))


def order(most: int, m: int) -> list[Action]:
    """Return a rank's actions: forward while it holds fewer than `most` of m micro-batches."""
    actions, forwards, backwards = [], 0, 0
    while backwards < m:
        if forwards < m and forwards - backwards < most:
            actions.append(("F", forwards))
            forwards += 1
        else:
            actions.append(("B", backwards))
            backwards += 1
    return actions


def check_order(actions: Sequence[Action]) -> None:
    """Raise ValueError unless each micro-batch has one forward and then one backward."""
    m = len(actions) // 2
    wanted = [(kind, i) for kind in "BF" for i in range(m)]
    if not m or sorted(actions) != wanted:
        raise ValueError(
            "an order has one forward and one backward of each micro-batch, numbered from 0, "
            f"but this one is {' '.join(f'{kind}{i}' for kind, i in actions) or 'empty'}"
        )
    for i in range(m):
        if actions.index(("B", i)) < actions.index(("F", i)):
            raise ValueError(f"B{i} comes before F{i}: a backward needs its forward first")


def bubble(ranks: Sequence[Sequence[Cell]]) -> float:
    """Return the part of all ranks' time in which they compute nothing."""
    cells = [cell for rank in ranks for cell in rank]
    whole = max(cell.end for cell in cells) - min(cell.start for cell in cells)
    busy = sum(cell.end - cell.start for cell in cells)
    return 1 - busy / (len(ranks) * whole)


def needs(step: Step, last: int) -> set[Step]:
    """Return what must be done before a step can begin. last: the last stage.

    The backward of a micro-batch counts as its "I", the half that the stage before waits for.
    """
    kind, i, stage = step
    if kind == "F":
        return {("F", i, stage - 1)} if stage else set()
    if kind == "W":
        return {("I", i, stage)}
    return {("F", i, stage)} | ({("I", i, stage + 1)} if stage < last else set())


def simulate(ranks: Sequence[Sequence[Step]]) -> list[list[Cell]]:
    """Return the cells of a run in which nothing but the stages takes time.

    ranks: the steps of each, in their order. A forward of all stages of a rank lasts 1.

    Raises ValueError, with what each rank waits for, if the ranks would wait for each other.
    """
    last = max(stage for steps in ranks for _, _, stage in steps)
    share = len(ranks) / (last + 1)
    ends: dict[Step, float] = {}
    cells: list[list[Cell]] = [[] for _ in ranks]
    left = [list(steps) for steps in ranks]
    while any(left):
        rank = next_rank(left, ends, last)
        kind, i, stage = step = left[rank].pop(0)
        free = cells[rank][-1].end if cells[rank] else 0.0
        start = max([free, *(ends[need] for need in needs(step, last))])
        cells[rank].append(Cell(kind, i, start, start + LASTS[kind] * share, stage))
        ends["I" if kind == "B" else kind, i, stage] = cells[rank][-1].end
    return cells


def next_rank(left: Sequence[Sequence[Step]], done: Iterable[Step], last: int) -> int:
    """Return a rank whose next step can begin.

    left: the steps that each rank has yet to do. done: those of all ranks, a full backward as its
    "I". last: the last stage.

    Raises ValueError, with what each rank waits for, if there is none.
    """
    done, split = set(done), any(kind == "I" for steps in left for kind, _, _ in steps)
    missing = {r: needs(steps[0], last) - done for r, steps in enumerate(left) if steps}
    for rank, needed in missing.items():
        if not needed:
            return rank
    waits = [
        f"rank {rank} waits for {'B' if kind == 'I' and not split else kind}{i} of stage {stage}"
        for rank, needed in missing.items()
        for kind, i, stage in sorted(needed)
    ]
    raise ValueError(f"this order never ends: {', '.join(waits)}")


def pytorch_length(schedule: str, p: int, m: int) -> float:
    """Return how many forwards a step lasts in PyTorch's own simulator, of a private module.

    schedule: the name of PyTorch's class. p: ranks, with one or two stages each. m: micro-batches.

    Raises RuntimeError if the simulator finds that the order never ends, as in PyTorch 2.13 for
    "Schedule1F1B", because it lists the micro-batches 1 to m for the last rank.
    """
    from torch.distributed.pipelining import _schedule_visualizer as visualizer

    with contextlib.redirect_stdout(io.StringIO()):  # it prints each step
        plan = visualizer.get_schedule_ops(schedule.removeprefix("Schedule"), p, m)
        plan = [
            [a for a in rank if a is not None and a.computation_type.value in LASTS]
            for rank in plan
        ]
        spaced = visualizer.add_schedule_op_spacing(plan)
    colors = visualizer.action_type_to_color_mapping
    unit = p / len({a.stage_index for rank in plan for a in rank})
    return (
        max(
            sum(1 if a is None else colors[a.computation_type].width for a in rank)
            for rank in spaced
        )
        * unit
    )
