"""The proof of the lesson on pipeline parallelism, and what its cells need besides.

An action is ("F", 3), the forward of micro-batch 3, or ("B", 3), its backward. A step is an action
and its stage: ("F", 3, 0). A backward in halves is "I", the gradient of the stage's input, and "W",
those of the weights.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from ddp_kit import compare, device
from ddp_kit.lessons import zero
from ddp_kit.lessons._gpt import Config, batches, make_gpt
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.zero import ADAM, SGD

SIZE = 32  # the width of the GPT, and how many tokens it reads
BY_HAND = {  # how many of m micro-batches a rank may hold
    "GPipe": lambda rank, p, m: m,
    "1F1B": lambda rank, p, m: p - rank,
}
PYTORCH = {  # the stages of a rank
    "ScheduleGPipe": lambda rank, p: [rank],
    "Schedule1F1B": lambda rank, p: [rank],
    "ScheduleInterleaved1F1B": lambda rank, p: [rank, rank + p],
    "ScheduleInterleavedZeroBubble": lambda rank, p: [rank, rank + p],
    "ScheduleZBVZeroBubble": lambda rank, p: [rank, 2 * p - 1 - rank],
}


class Cell(NamedTuple):
    """What a rank has computed for one micro-batch, and when."""

    kind: str
    micro_batch: int
    start: float
    end: float
    stage: int


def ideal_bubble(p: int, m: int) -> int:
    """Return the bubble of GPipe and 1F1B in percent, if all stages are alike."""
    return round(100 * (p - 1) / (m + p - 1))


def step_length(times, m):
    """Return how long a step lasts whose stages take `times`, if the last one is the slowest."""
    return sum(times) + (m - 1) * max(times)


def config_for(world_size):
    """Return the sizes of a GPT with two blocks for each rank."""
    return Config(layers=2 * world_size, width=SIZE, context=SIZE)


def next_rank(left, done, last):
    """Return a rank whose next step can begin.

    left: the steps that each rank has yet to do. done: those of all ranks, a full backward as its
    "I". last: the last stage.

    Raises ValueError, with what each rank waits for, if there is none.
    """
    missing = {r: lesson.needs(steps[0], last) - set(done) for r, steps in enumerate(left) if steps}
    for rank, needed in missing.items():
        if not needed:
            return rank
    split = any(kind == "I" for steps in left for kind, *_ in steps)
    waits = [
        f"rank {rank} waits for {'B' if kind == 'I' and not split else kind}{i} of stage {stage}"
        for rank, needed in missing.items()
        for kind, i, stage in sorted(needed)
    ]
    raise ValueError(f"this order never ends: {', '.join(waits)}")


def steps_of(ranks):
    """Return the steps of each rank's cells, for `simulate`."""
    return [[(c.kind, c.micro_batch, c.stage) for c in cells] for cells in ranks]


def _start(schedule, model, m):
    """Build this rank's part of a pipeline.

    Returns what runs a batch, (tokens, targets) -> this rank's losses; this rank's stages; their
    cells; and the rank of the last stage.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    chosen = (BY_HAND | PYTORCH)[schedule]
    loss_fn = partial(lesson.mean_loss, m)
    if schedule in BY_HAND:
        pipeline = lesson.Pipeline(lesson.GPTStage(model, rank, p), SIZE, loss_fn)
        step = partial(pipeline.step, lesson.order(chosen(rank, p, m), m))
        return step, [pipeline.stage], pipeline.cells, p - 1
    mine, cells = chosen(rank, p), []
    total = p * len(mine)
    parts = [lesson.GPTStage(model, i, total) for i in mine]
    stages = [
        lesson.RecordedStage(part, i, total, device(), cells=cells)
        for part, i in zip(parts, mine, strict=True)
    ]
    # With scale_grads=True, each stage divides its gradients by m; a weight of two stages, twice.
    running = getattr(pipelining, schedule)(
        stages if len(stages) > 1 else stages[0], m, loss_fn=loss_fn, scale_grads=False
    )

    def step(tokens, targets):
        losses = []
        given = [tokens.contiguous()] if 0 in mine else []
        running.step(*given, target=targets, losses=losses, return_outputs=False)
        return losses

    return step, parts, cells, next(r for r in range(p) if total - 1 in chosen(r, p))


def train(rank, world_size, schedule, micro_batches=8, optimizer_cls=SGD, steps=3, sequences=24):
    """Train a GPT, two blocks on each rank, with one of the schedules.

    Returns this rank's "losses", empty without the last stage, "parameters" by name, and the
    "cells" of the last step. Raises ValueError if the micro-batches cannot be equal.
    """
    lesson.cut(torch.empty(sequences), micro_batches)
    model = make_gpt(config_for(world_size))
    step, stages, cells, last = _start(schedule, model, micro_batches)
    group = dist.new_group([0, last]) if last else None
    mine = list(nn.ModuleList(stages).parameters())
    optimizer, losses = optimizer_cls(mine), []
    for tokens, targets in batches(sequences, steps, SIZE):
        optimizer.zero_grad()
        dist.barrier()
        cells.clear()
        shares = step(tokens, targets)
        if group is not None and rank in (0, last):  # each has a gradient of the shared weight
            dist.all_reduce(model.tokens.weight.grad, group=group)
        optimizer.step()
        losses += [sum(share.item() for share in shares)] if shares else []
    own = set(mine)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters() if p in own}
    return {"losses": losses, "parameters": parameters, "cells": cells}


def train_alone(world_size, optimizer_cls=SGD, steps=3, sequences=24):
    """Train the GPT of `world_size` ranks in this process; return "losses" and "parameters"."""
    return zero.train_alone(optimizer_cls, steps, sequences, config=config_for(world_size))


def of_each_rank(whole, mine):
    """Return those of one process' parameters that each rank has; mine: those of each, by name."""
    return [{name: whole[name] for name in each} for each in mine]


def boundary_bytes(result):
    """Return the bytes of all messages from a rank to another one, by (src, dst)."""
    sent = Counter()
    for message in result.trace.messages():
        sent[message.src, message.dst] += message.nbytes
    return sent


@lesson_main("pipeline_parallel")
def main(ranks: Ranks) -> str:
    """Train with each schedule, compare with one process, and print one line."""
    n = ranks.world_size
    alone = train_alone(n, ADAM, 2, 4 * n)["parameters"]
    for schedule in (*BY_HAND, *PYTORCH):
        result = ranks(train, schedule, 2 * n, ADAM, 2, 4 * n)
        mine = [state["parameters"] for state in result]
        prove(f"{schedule} has all of it", alone.keys() == set().union(*mine))
        found = compare(mine, of_each_rank(alone, mine))
        prove(f"{schedule} trains as one process does", found)
    return "7 schedules train as one process does"


from ddp_kit.lessons import pipeline_parallel as lesson
