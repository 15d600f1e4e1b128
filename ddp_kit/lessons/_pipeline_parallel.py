"""The proof of the lesson on pipeline parallelism, and what its cells need besides.

An action is ("F", 3), the forward of micro-batch 3, or ("B", 3), its backward. A step is an action
and its stage: ("F", 3, 0). A backward in halves is "I", the gradient of the stage's input, and "W",
those of the weights.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import pipelining

from ddp_kit import compare, device
from ddp_kit.error_text import count
from ddp_kit.lessons import zero
from ddp_kit.lessons._gpt import Config, batches, make_gpt
from ddp_kit.lessons._launch import Ranks, choose, lesson_main, prove
from ddp_kit.lessons.zero import copies
from ddp_kit.notebook.controls import Explorer

SGD = zero.SGD  # a name of this lesson, too: the call below a picture has it
ADAM = zero.ADAM
WAIT = 0.04  # seconds added to a forward, where a picture shall show bubbles, not shared cores
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
    """What a rank has computed for one micro-batch, in seconds since the step began."""

    kind: str
    micro_batch: int
    start: float
    end: float
    stage: int


def config_for(world_size, tied=True):
    """Return the sizes of a GPT with two blocks for each rank."""
    return Config(layers=2 * world_size, width=SIZE, context=SIZE, tied=tied)


def check_order(actions):
    """Raise ValueError unless each micro-batch has one forward and then one backward."""
    m = len(actions) // 2
    right = m and sorted(actions) == [(kind, i) for kind in "BF" for i in range(m)]
    if not right or any(actions.index(("B", i)) < actions.index(("F", i)) for i in range(m)):
        raise ValueError(
            "an order has one forward and then one backward of each micro-batch, numbered from 0, "
            f"but this one is {' '.join(f'{kind}{i}' for kind, i in actions) or 'empty'}"
        )


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


def pytorch_length(schedule, p, m):
    """Return how many forwards a step lasts in PyTorch's own simulator, of a private module.

    Raises RuntimeError if the simulator finds that the order never ends, as in PyTorch 2.13 for
    "Schedule1F1B", because it lists the micro-batches 1 to m for the last rank.
    """
    from torch.distributed.pipelining import _schedule_visualizer as visualizer

    with contextlib.redirect_stdout(io.StringIO()):  # it prints each step
        plan = visualizer.get_schedule_ops(schedule.removeprefix("Schedule"), p, m)
        plan = [
            [a for a in rank if a and a.computation_type.value in lesson.LASTS] for rank in plan
        ]
        spaced = visualizer.add_schedule_op_spacing(plan)
    colors = visualizer.action_type_to_color_mapping
    lengths = [sum(colors[a.computation_type].width if a else 1 for a in rank) for rank in spaced]
    return max(lengths) * p / len({a.stage_index for rank in plan for a in rank})


class _Activations:
    """Counts the bytes that autograd keeps for backwards, without those of parameters.

    most: the highest number of bytes at any time.
    """

    def __init__(self, parameters):
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self.users = Counter()  # of each memory
        self.now = self.most = 0

    def watch(self):
        return saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor)

    def count(self, storage, users):
        """Note that one user of a memory has come, 1, or gone, -1."""
        at = storage.data_ptr()
        if at in self.parameters:
            return
        self.users[at] += users
        if self.users[at] == max(users, 0):  # the first one, or the last
            self.now += users * storage.nbytes()
            self.most = max(self.most, self.now)


class _Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor, activations):
        self.tensor, self.activations = tensor, activations
        activations.count(tensor.untyped_storage(), 1)

    def __del__(self):
        self.activations.count(self.tensor.untyped_storage(), -1)


def _start(schedule, model, m, wait):
    """Build this rank's part of a pipeline.

    Returns what runs a batch, (tokens, targets) -> this rank's losses; this rank's stages; their
    cells; and the rank of the last stage.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    chosen = choose("schedule", schedule, BY_HAND | PYTORCH)
    loss_fn = partial(lesson.mean_loss, m)
    if schedule in BY_HAND:
        pipeline = lesson.Pipeline(lesson.GPTStage(model, rank, p), SIZE, loss_fn)
        actions = lesson.order(chosen(rank, p, m), m)
        step = partial(pipeline.step, actions, wait=wait)
        return step, [pipeline.stage], pipeline.cells, p - 1
    mine, cells = chosen(rank, p), []
    total, wait = p * len(mine), wait / len(mine)
    parts = [lesson.GPTStage(model, i, total) for i in mine]
    stages = [
        lesson.RecordedStage(part, i, total, device(), cells=cells, wait=wait)
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


def train(
    rank,
    world_size,
    schedule="1F1B",
    micro_batches=8,
    optimizer_cls=SGD,
    steps=3,
    wait=0,
    sequences=24,
    tied=True,
):
    """Train a GPT, two blocks on each rank, with one of the schedules.

    wait: seconds that each forward of a rank waits; a backward waits twice.

    Returns this rank's "losses", empty without the last stage, "parameters" by name, the "cells" of
    the last step, and "activations", the bytes that it kept for backwards at most. Raises
    ValueError if the micro-batches cannot be equal.
    """
    lesson.cut(torch.empty(sequences), micro_batches)
    model = make_gpt(config_for(world_size, tied))
    step, stages, cells, last = _start(schedule, model, micro_batches, wait)
    group = dist.new_group([0, last]) if tied and last else None
    mine = list(nn.ModuleList(stages).parameters())
    optimizer, losses = optimizer_cls(mine), []
    for tokens, targets in batches(sequences, steps, SIZE):
        optimizer.zero_grad()
        dist.barrier()
        cells.clear()
        began, activations = time.monotonic(), _Activations(mine)
        with activations.watch():
            shares = step(tokens, targets)
        if group is not None and rank in (0, last):  # each has a gradient of the shared weight
            dist.all_reduce(model.tokens.weight.grad, group=group)
        optimizer.step()
        losses += [sum(share.item() for share in shares)] if shares else []
    own = set(mine)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters() if p in own}
    return {
        "losses": losses,
        "parameters": parameters,
        "cells": [c._replace(start=c.start - began, end=c.end - began) for c in cells],
        "activations": activations.most,
    }


def train_alone(world_size, optimizer_cls=SGD, steps=3, sequences=24, tied=True, parts=1):
    """Train the GPT of `world_size` ranks in this one process; return "losses", "parameters".

    parts: how many micro-batches to cut a batch into.
    """
    model = make_gpt(config_for(world_size, tied))
    optimizer, losses = optimizer_cls(model.parameters()), []
    for batch in batches(sequences, steps, SIZE):
        optimizer.zero_grad()
        shares = []
        for tokens, targets in zip(*(lesson.cut(half, parts) for half in batch), strict=True):
            shares.append(lesson.mean_loss(parts, model(tokens), targets))
            shares[-1].backward()
        optimizer.step()
        losses.append(sum(share.item() for share in shares))
    return {"losses": losses, "parameters": copies(model)}


def of_each_rank(whole, mine):
    """Return those of one process' parameters that each rank has; mine: those of each, by name.

    Raises ValueError if no rank has a parameter, or if a rank has one that the process lacks.
    """
    if unlike := whole.keys() ^ set().union(*mine):
        raise ValueError(
            f"the ranks together or one process have no {min(unlike)}: train_alone and the ranks "
            "need the same world size"
        )
    return [{name: whole[name] for name in each} for each in mine]


def boundary_bytes(result):
    """Return the bytes of all messages from a rank to another one, by (src, dst)."""
    sent = Counter()
    for message in result.trace.messages():
        sent[message.src, message.dst] += message.nbytes
    return sent


def explore(schedule="1F1B", world_size=4, micro_batches=8):
    """Train for one step in a pipeline, and draw which rank computed what, and the bubble.

    schedule: one of those by hand, "GPipe" and "1F1B", or of PyTorch's, such as "ScheduleGPipe". A
    forward of a rank waits 40 ms. In JupyterLab, controls follow. Raises PoolError for an invalid
    choice, and RankError for a number of micro-batches that PyTorch's schedule refuses.
    """
    from ddp_kit import plot  # ranks do not need it

    choices = {
        "schedule": (*BY_HAND, *PYTORCH),
        "world_size": range(1, 9),
        "micro_batches": [1, 2, 3, 4, 6, 8, 12, 24],
    }

    def draw(result, settings):
        p, m = count(settings["world_size"], "rank"), settings["micro_batches"]
        cells = [state["cells"] for state in result]
        best = 100 * lesson.bubble(lesson.simulate(steps_of(cells)))
        title = f"{settings['schedule']} with {p}, m = {m}: {best:.1f} % idle at best"
        return plot.pipeline(cells, title=f"{title}, by simulation")

    return Explorer(
        "pipeline_parallel",
        {"schedule": schedule, "world_size": world_size, "micro_batches": micro_batches},
        lambda chosen: choices,
        ask=lambda chosen: (train, chosen["schedule"], chosen["micro_batches"], SGD, 1, WAIT),
        draw=draw,
    )


@lesson_main("pipeline_parallel")
def main(ranks: Ranks) -> str:
    """Train with each schedule, compare with one process, count bytes, and print one line."""
    n = ranks.world_size
    m, sequences = 2 * n, 4 * n
    nbytes = 2 * sequences * SIZE * SIZE * 4  # of the activations at a cut, in two steps
    ends = [(a, b) for a in range(n) for b in range(n) if abs(a - b) == 1]
    for optimizer_cls in (SGD, ADAM):
        alone = train_alone(n, optimizer_cls, 2, sequences)
        for schedule in (*BY_HAND, *PYTORCH):
            result = ranks(train, schedule, m, optimizer_cls, 2, 0, sequences)
            mine = [state["parameters"] for state in result]
            whole = of_each_rank(alone["parameters"], mine)
            prove(f"{schedule} trains as one process does", compare(mine, whole))
            losses = next(state["losses"] for state in result if state["losses"])
            prove(f"{schedule} has its losses", compare(losses, alone["losses"]))
            if schedule in BY_HAND and n > 1:
                sent = boundary_bytes(result)
                prove(f"{schedule} sends {nbytes:,} bytes", sent == dict.fromkeys(ends, nbytes))
    return "7 schedules train as one process does"


from ddp_kit.lessons import pipeline_parallel as lesson
