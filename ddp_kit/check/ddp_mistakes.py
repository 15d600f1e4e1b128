"""Graders of lesson 09, some of them in the notebook of 08: samplers, checkpoints, uneven parts."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.check.compared import MANY, compared, hunt
from ddp_kit.check.ddp import noting
from ddp_kit.check.grader import SIZES, Grader, exercise
from ddp_kit.error_text import count, name_ranks
from ddp_kit.errors import DeadlockError, RankError
from ddp_kit.pool import Result

SEEDS = (7, 1000)  # further apart than the epochs are
SHUFFLED = "shuffled by seed and epoch"
OTHERS = "nothing else is changed"
NAMES, ONE_SAVES, WAITED = "the network's names", "only rank 0 saves", "ranks wait for the file"


@exercise("8.2", "OwnSampler(data, seed)", "for 2, 10, 12 and 23 examples", others=(SHUFFLED,))
def _own_sampler(grader: Grader, world_size: int) -> None:
    for length in (12, 10, 23, 2):
        case = f"OwnSampler(range({length}), seed={SEEDS[0]})"
        result = grader.run(_deal, length, world_size=world_size, case=case)
        if len(result.trace):
            fact = f"{result.trace.events[0].op} was called"
            grader.fail(fact, hint="ranks communicate")
        _check_hands(grader, length)
        first, other, again, reseeded = ([dealt["hands"][i] for dealt in result] for i in range(4))
        if length >= 10:  # fewer may be shuffled alike twice
            _check_shuffled(grader, "epochs 0 and 1 have", first, other)
            _check_shuffled(grader, "seeds {} and {} give".format(*SEEDS), first, reseeded)
        if any(dealt["seeded"] for dealt in result):
            fact = "it changed the random state of the whole process"
            grader.fail(fact, hint="process seeded", part=SHUFFLED)
        if first != again:
            fact = "epoch 0 has a different order the second time"
            grader.fail(fact, hint="generator goes on", part=SHUFFLED)


def _check_shuffled(grader: Grader, whose: str, hands: list[list], others: list[list]) -> None:
    """Fail if two orders are the same; on a single rank, also if one is only rotated."""
    if hands == others:
        grader.fail(f"{whose} the same order", hint="same order", part=SHUFFLED)
    order, other = hands[0], others[0]
    if len(hands) == 1 and any(order[i:] + order[:i] == other for i in range(len(order))):
        fact = f"{whose} the same order, only starting at a different position"
        grader.fail(fact, hint="only rotated", part=SHUFFLED)


def _check_hands(grader: Grader, length: int) -> None:
    """Fail unless all ranks get equally many positions, and each position goes to a rank."""
    result = grader.result
    each = -(-length // len(result))
    for epoch in range(2):
        hands = [dealt["hands"][epoch] for dealt in result]
        gets = [f"rank {rank} gets {hand}" for rank, hand in enumerate(hands)]
        if wrong := [rank for rank, hand in enumerate(hands) if len(hand) != each]:
            fact = f"{name_ranks(wrong)} should get {count(each, 'position')}"
            grader.fail(fact, *gets, hint="not filled up")
        if beyond := sorted(set(chain(*hands)) - set(range(length))):
            grader.fail(f"there is no position {beyond[0]}", *gets, hint="positions beyond")
        if missing := sorted(set(range(length)) - set(chain(*hands))):
            grader.fail(f"no rank gets position {missing[0]}", *gets, hint="positions lost")


def _deal(rank: int, world_size: int, own_sampler: Callable, length: int) -> dict:
    """Deal four hands of positions, and check whether torch's global random state changed."""
    before = torch.get_rng_state()
    sampler, reseeded = (own_sampler(range(length), seed) for seed in SEEDS)
    hands = []
    for dealer, epoch in ((sampler, 0), (sampler, 1), (sampler, 0), (reseeded, 0)):
        dealer.set_epoch(epoch)
        hands.append([operator.index(position) for position in dealer])  # it may be a tensor
    return {"hands": hands, "seeded": not torch.equal(torch.get_rng_state(), before)}


@exercise("8.4", "average_statistics(model)", others=(OTHERS,))
def _average_statistics(grader: Grader, world_size: int) -> None:
    result = grader.run(_average_buffers, world_size=world_size)
    for name, want, hint, part in (
        ("running_mean", torch.full((2,), 30.0 * (world_size + 1)), "not averaged", ""),
        ("running_var", torch.full((2,), 60.0 * (world_size + 1)), "not averaged", ""),
        ("num_batches_tracked", torch.tensor(3), "counts summed", OTHERS),
        ("weight", torch.ones(2), "parameters changed", OTHERS),
    ):
        found, place = [held[name] for held in result], f" in {name}"
        grader.compare([want] * world_size, found, hint, place=place, part=part)


def _average_buffers(rank: int, world_size: int, average_statistics: Callable) -> dict:
    norm = nn.BatchNorm1d(2)
    model = DistributedDataParallel(nn.Sequential(norm))
    norm.running_mean.fill_(60 * (rank + 1))
    norm.running_var.fill_(120 * (rank + 1))
    norm.num_batches_tracked.fill_(3)
    average_statistics(model)
    return {name: tensor.clone() for name, tensor in norm.state_dict().items()}


_UNREAD = {"key(s) in state_dict": "wrapper saved"} | dict.fromkeys(
    ("FileNotFoundError", "EOFError", "UnpicklingError"), "read too early"
)


@exercise(
    "8.5",
    "save_and_load(model, path, plain)",
    on_failure={RankError: _UNREAD, DeadlockError: "barrier on some"},
    others=(NAMES, ONE_SAVES, WAITED),
)
def _save_and_load(grader: Grader, world_size: int) -> None:
    with TemporaryDirectory() as folder:
        path = f"{folder}/network.pt"
        limit = 2.0 if world_size == SIZES[0] else 0.2  # most mistakes show in the first run
        result = grader.run(_save_or_wait, path, limit, world_size=world_size)
        if not Path(path).exists():
            grader.fail("there is no file at `path`", hint="nobody saves")
        saved = torch.load(path, weights_only=False)
    wanted = [torch.tensor([[1.0, 2.0]])] * world_size
    found = [r["weight"] for r in result]
    grader.compare(wanted, found, "not loaded", place=" in plain.weight")
    if set(saved) != {"weight"}:
        names = ", ".join(map(str, saved))
        fact = f"right, but the names in the file are {names}"
        grader.fail(fact, hint="wrapper saved", part=NAMES)
    if others := [rank for rank, r in enumerate(result) if rank and r["saves"]]:
        fact = f"right, but {name_ranks(others)} saved as well"
        grader.fail(fact, hint="all save", part=ONE_SAVES)
    before = _collectives_before(result, 0, result[0]["saved"])
    for rank in range(1, world_size):
        if _collectives_before(result, rank, result[rank]["loads"]) <= before:
            fact = f"right, but rank {rank} did not wait for rank 0's file"
            grader.fail(fact, hint="read too early", part=WAITED)


def _collectives_before(result: Result, rank: int, moment: int) -> int:
    """Return how many collectives a rank had left at a moment, of time.monotonic_ns()."""
    calls = [event for event in result.trace if (event.rank, event.kind) == (rank, "collective")]
    return sum(event.end is not None and event.end <= moment for event in calls)


def _save_or_wait(
    rank: int, world_size: int, save_and_load: Callable, path: str, limit: float
) -> dict:
    """Save and load; rank 0 saves when another rank has tried to load, or after `limit` seconds.

    A rank that does not wait then finds no file.
    """
    network, plain = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        network.weight.copy_((rank + 1) * torch.tensor([[1.0, 2.0]]))
        plain.weight.zero_()
    model = DistributedDataParallel(network)
    moments: dict[str, list[int]] = {"saved": [], "loads": []}
    save, load = torch.save, torch.load
    tried = Path(f"{path}.tried")

    def noting_save(*args: Any, **options: Any) -> None:
        end = time.monotonic() + limit
        while rank == 0 < world_size - 1 and not tried.exists() and time.monotonic() < end:
            time.sleep(0.01)
        save(*args, **options)
        moments["saved"].append(time.monotonic_ns())

    def noting_load(*args: Any, **options: Any) -> Any:
        moments["loads"].append(time.monotonic_ns())
        try:
            return load(*args, **options)
        finally:
            if rank > 0:
                tried.touch()

    with patch.object(torch, "save", noting_save), patch.object(torch, "load", noting_load):
        save_and_load(model, path, plain)
    return {
        "weight": plain.weight.detach(),
        "saves": len(moments["saved"]),
        "saved": max(moments["saved"], default=0),
        "loads": min(moments["loads"], default=0),
    }


hunt(*(f"9.{number}" for number in range(1, 11)))


@compared("9.11", "train_uneven(model, optimizer, batches)", kind="function")
def _train_uneven(rank: int, world_size: int, train_uneven: Callable) -> dict:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lengths = ((2, 2, 1), (3,), ())[rank]
    batches = [(torch.rand(n, 2) + rank, torch.rand(n, 1)) for n in lengths]
    with noting(notes := []):
        steps = train_uneven(model, optimizer, batches)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    few = len([each for each in notes if each != "wait"]) <= 3 + 1
    return {"the steps": steps, **parameters, "one all_reduce a step": few}


@compared("9.a", "mean_loss(losses)", spare=MANY)
def _mean_loss(rank: int, world_size: int, mean_loss: Callable) -> dict:
    weight = torch.ones(1, requires_grad=True)
    losses = weight * torch.tensor(([6.0], [12.0, 24.0, 30.0, 18.0], [3.0, 9.0])[rank])
    mean_loss(losses).backward()
    mean = weight.grad.clone()
    dist.all_reduce(mean)
    return {"the gradient that DDP leaves": mean / world_size}


@compared("9.b", "share_right(right)", spare=MANY)
def _share_right(rank: int, world_size: int, share_right: Callable) -> dict:
    parts = {
        "of 5 examples, 1 and 2": ([1, 1, 1, 0, 0], [1], [0, 1])[rank],
        "where rank 0 has no example": ([], [1, 0, 0], [1])[rank],
    }
    shares = {
        f"the share {case}": share_right(torch.tensor(part, dtype=torch.bool))
        for case, part in parts.items()
    }
    # Two NaN are not equal, and a mistake that leads to one should be known by it.
    return {case: "nan" if share != share else share for case, share in shares.items()}


@compared("9.c", "StopTogether(patience)", spare=MANY)
def _stop_together(rank: int, world_size: int, stop_together: Callable) -> dict:
    losses = ([8, 4, 5, 3, 3, 3, 3], [9, 8, 7, 10, 7, 9, 1], [5, 5, 5, 5, 5, 5, 5])[rank]
    stop = stop_together(2)
    return {f"the answer in epoch {n}": stop(float(loss)) for n, loss in enumerate(losses, 1)}
