"""Pipeline parallelism: each rank has some layers, and a batch passes them in micro-batches.

By hand: send and recv between the stages of a GPT, in three orders of the forwards and backwards of
micro-batches. The same with PyTorch's torch.distributed.pipelining, whose schedules also put
several stages on a rank, or split the backward. Each trains as one process does. Sources: Huang et
al., "GPipe" (2018), arXiv 1811.06965; Harlap et al., "PipeDream" (2018), arXiv 1806.03377;
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(2021), arXiv 2104.04473; Qi et al., "Zero Bubble Pipeline Parallelism" (2023), arXiv 2401.10241.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

from ddp_kit import compare, device
from ddp_kit.error_text import count
from ddp_kit.launch import choose, lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._gpt import GPT, Config, batches, make_gpt
from ddp_kit.lessons._pipeline_orders import (  # noqa: F401 - the notebook uses them
    BY_HAND,
    LASTS,
    Action,
    Cell,
    Step,
    bubble,
    cell,
    check_order,
    needs,
    next_rank,
    order,
    pytorch_length,
    simulate,
)
from ddp_kit.lessons._pipeline_stages import (  # noqa: F401
    Activations,
    ForwardByHand,
    GPTStage,
    Kept,
    Neighbours,
    Pipeline,
    RecordedStage,
    StageByHand,
    cut,
)
from ddp_kit.lessons.zero import ADAM, SGD, copies
from ddp_kit.notebook.controls import Explorer
from ddp_kit.pool import Result

State = dict[str, Any]
WAIT = 0.04  # seconds added to a forward, where a picture shall show bubbles, not shared cores
PYTORCH: dict[str, Callable[[int, int], list[int]]] = {  # the stages of a rank
    "ScheduleGPipe": lambda rank, p: [rank],
    "Schedule1F1B": lambda rank, p: [rank],
    "ScheduleInterleaved1F1B": lambda rank, p: [rank, rank + p],
    "ScheduleInterleavedZeroBubble": lambda rank, p: [rank, rank + p],
    "ScheduleZBVZeroBubble": lambda rank, p: [rank, 2 * p - 1 - rank],
}


def mean_loss(m: int, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the share that one of m micro-batches has in the mean loss of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / m


@dataclass
class Running:
    """A pipeline on this rank.

    step: runs a batch, (tokens, targets) -> this rank's losses. stages: this rank's, in the order
    of the model. ends: the ranks that have the first and the last stage.
    """

    step: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
    stages: Sequence[nn.Module]
    cells: list[Cell]
    ends: tuple[int, int]


def start_by_hand(schedule: str, model: GPT, m: int, wait: float) -> Running:
    """Build this rank's part of a pipeline by hand."""
    rank, p = dist.get_rank(), dist.get_world_size()
    stage = GPTStage(model, rank, p)
    pipeline = Pipeline(stage, model.norm.normalized_shape[0], partial(mean_loss, m))
    actions = order(BY_HAND[schedule](rank, p, m), m)
    return Running(partial(pipeline.step, actions, wait=wait), [stage], pipeline.cells, (0, p - 1))


def start_pytorch(schedule: str, model: GPT, m: int, wait: float) -> Running:
    """Build this rank's part of one of PyTorch's pipelines."""
    rank, p = dist.get_rank(), dist.get_world_size()
    mine, cells = PYTORCH[schedule](rank, p), []
    count, wait = p * len(mine), wait / len(mine)
    stages = [
        RecordedStage(GPTStage(model, i, count), i, count, device(), cells=cells, wait=wait)
        for i in mine
    ]
    # With scale_grads=True, each stage divides its gradients by m; a weight of two stages, twice.
    running = getattr(pipelining, schedule)(
        stages if len(stages) > 1 else stages[0],
        m,
        loss_fn=partial(mean_loss, m),
        scale_grads=False,
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        given = [tokens.contiguous()] if 0 in mine else []
        running.step(*given, target=targets, losses=losses, return_outputs=False)
        return losses

    last = next(r for r in range(p) if count - 1 in PYTORCH[schedule](r, p))
    return Running(step, [stage.submod for stage in stages], cells, (0, last))


def start(schedule: str, model: GPT, m: int, wait: float = 0) -> Running:
    """Build this rank's part of a pipeline, for m micro-batches; `wait`: seconds per forward.

    Raises PoolError if there is no such schedule.
    """
    begin = choose(
        "schedule",
        schedule,
        dict.fromkeys(BY_HAND, start_by_hand) | dict.fromkeys(PYTORCH, start_pytorch),
    )
    return begin(schedule, model, m, wait)


def train(
    rank: int,
    world_size: int,
    schedule: str = "1F1B",
    micro_batches: int = 8,
    optimizer_cls: Callable = SGD,
    steps: int = 3,
    wait: float = 0,
    sequences: int = 24,
    tied: bool = True,
) -> State:
    """Train a GPT, two blocks on each rank, with one of the schedules.

    wait: seconds that each forward of a rank waits; a backward waits twice.

    Returns this rank's "losses", empty without the last stage, "parameters" by name, the "cells" of
    the last step, and "activations", the bytes that it kept for backwards at most. Raises
    ValueError if the micro-batches cannot be equal.
    """
    cut(torch.empty(sequences), micro_batches)
    model = make_gpt(config_for(world_size, tied))
    running = start(schedule, model, micro_batches, wait)
    both = sorted({*running.ends})
    group = dist.new_group(both) if tied and len(both) > 1 else None
    mine = list(nn.ModuleList(running.stages).parameters())
    optimizer, losses = optimizer_cls(mine), []
    for tokens, targets in batches(sequences, steps, context_of(model)):
        optimizer.zero_grad()
        dist.barrier()
        running.cells.clear()
        began, activations = time.monotonic(), Activations(mine)
        with activations.watch():
            shares = running.step(tokens, targets)
        if group is not None and rank in both:  # each has a gradient of the shared weight
            dist.all_reduce(model.tokens.weight.grad, group=group)
        optimizer.step()
        losses += [sum(share.item() for share in shares)] if shares else []
    own = {id(parameter) for parameter in mine}
    return {
        "losses": losses,
        "parameters": {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if id(parameter) in own
        },
        "cells": [c._replace(start=c.start - began, end=c.end - began) for c in running.cells],
        "activations": activations.most,
    }


def config_for(world_size: int, tied: bool = True) -> Config:
    """Return the sizes of a GPT with two blocks for each rank."""
    return Config(layers=2 * world_size, width=32, context=32, tied=tied)


def context_of(model: GPT) -> int:
    """Return the longest text that a GPT reads."""
    return model.positions.num_embeddings


def train_alone(
    world_size: int,
    optimizer_cls: Callable = SGD,
    steps: int = 3,
    sequences: int = 24,
    tied: bool = True,
    parts: int = 1,
) -> State:
    """Train the GPT of `world_size` ranks in this one process; return "losses", "parameters".

    parts: how many micro-batches to cut a batch into.
    """
    model = make_gpt(config_for(world_size, tied))
    optimizer, losses = optimizer_cls(model.parameters()), []
    for batch in batches(sequences, steps, context_of(model)):
        optimizer.zero_grad()
        shares = []
        for tokens, targets in zip(*(cut(half, parts) for half in batch), strict=True):
            shares.append(mean_loss(parts, model(tokens), targets))
            shares[-1].backward()
        optimizer.step()
        losses.append(sum(share.item() for share in shares))
    return {"losses": losses, "parameters": copies(model)}


def of_each_rank(whole: dict[str, torch.Tensor], mine: Sequence[dict]) -> list[dict]:
    """Return those of one process' parameters that each rank has.

    mine: the parameters of each rank, by name.

    Raises ValueError if no rank has a parameter, or if a rank has one that the process lacks.
    """
    held = set().union(*mine)
    if missing := whole.keys() - held:
        raise ValueError(
            f"no rank has {min(missing)}: train_alone and the ranks need the same world size"
        )
    if unknown := held - whole.keys():
        raise ValueError(
            f"one process has no {min(unknown)}: train_alone needs the world size of the ranks"
        )
    return [{name: whole[name] for name in each} for each in mine]


def steps_of(ranks: Iterable[Iterable[Cell]]) -> list[list[Step]]:
    """Return the steps of each rank's cells, for `simulate`."""
    return [[(c.kind, c.micro_batch, c.stage) for c in cells] for cells in ranks]


def boundary_bytes(result: Result) -> dict[tuple[int, int], int]:
    """Return the bytes of all messages from a rank to another one, by (src, dst)."""
    sent: dict[tuple[int, int], int] = {}
    for message in result.trace.messages():
        ends = message.src, message.dst
        sent[ends] = sent.get(ends, 0) + message.nbytes
    return sent


def expected_bytes(world_size: int, micro_batches: int, sequences: int, steps: int = 1) -> int:
    """Return the bytes of a boundary in each direction, by the formula, for `train`.

    A micro-batch of b sequences of s tokens has b s h activations, and as many gradients, in
    float32; h is the width.
    """
    config = config_for(world_size)
    b = sequences // micro_batches
    return steps * micro_batches * b * config.context * config.width * 4


def explore(schedule: str = "1F1B", world_size: int = 4, micro_batches: int = 8) -> Explorer:
    """Train for one step in a pipeline, and draw which rank computed what, and the bubble.

    schedule: one of those by hand, "GPipe" and "1F1B", or of PyTorch's, such as "ScheduleGPipe". A
    forward of a rank waits 40 ms. In JupyterLab, controls follow. Raises PoolError for an invalid
    choice, and RankError for a number of micro-batches that PyTorch's schedule refuses.
    """
    from ddp_kit import plot  # ranks do not need it

    names = (*BY_HAND, *PYTORCH)

    def choices(settings: dict) -> dict:
        return {
            "schedule": names,
            "world_size": range(1, 9),
            "micro_batches": [1, 2, 3, 4, 6, 8, 12, 24],
        }

    def draw(result: Result, settings: dict):
        p, m = count(settings["world_size"], "rank"), settings["micro_batches"]
        cells = [state["cells"] for state in result]
        best = 100 * bubble(simulate(steps_of(cells)))
        title = (
            f"{settings['schedule']} with {p}, m = {m}: {best:.1f} % idle at best, by simulation"
        )
        return plot.pipeline(cells, title=title)

    return Explorer(
        "pipeline_parallel",
        {"schedule": schedule, "world_size": world_size, "micro_batches": micro_batches},
        choices,
        ask=lambda chosen: (train, chosen["schedule"], chosen["micro_batches"], SGD, 1, WAIT),
        draw=draw,
    )


def main(argv: list[str] | None = None) -> None:
    """Train with each schedule, compare with one process, count bytes, and print one line."""
    options = lesson_parser("pipeline_parallel", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        m, sequences = 2 * n, 4 * n
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
                    nbytes = expected_bytes(n, m, sequences, steps=2)
                    ends = [(a, b) for a in range(n) for b in range(n) if abs(a - b) == 1]
                    sent = boundary_bytes(result)
                    prove(f"{schedule} sends {nbytes:,} bytes", sent == dict.fromkeys(ends, nbytes))
        ranks.say(f"pipeline_parallel: {ranks}, 7 schedules train as one process does")


if __name__ == "__main__":
    run_as_script(main)
