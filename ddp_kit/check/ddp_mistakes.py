"""Graders of lesson 09, some of them in the notebook of 08: samplers, checkpoints, uneven parts."""

from __future__ import annotations

import operator
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.check.compared import MANY, compared, hunt, in_parts
from ddp_kit.check.ddp import noting
from ddp_kit.check.grader import SIZES, Grader, exercise, shared_folder
from ddp_kit.error_text import count, name_ranks
from ddp_kit.errors import DeadlockError, RankError

SEEDS = (7, 1000)  # further apart than the epochs are
SHUFFLED = "shuffled by seed and epoch"
OTHERS = "nothing else is changed"
NAMES, ONE_SAVES = "the network's names", "only rank 0 saves"


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
            if length > 12 and world_size > 1 and list(map(set, first)) == list(map(set, other)):
                fact = "each rank gets the positions of epoch 0 again in epoch 1, in another order"
                grader.fail(fact, hint="dealt before shuffled", part=SHUFFLED)
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
        position, times = Counter(chain(*hands)).most_common(1)[0]
        if times > -(-each * len(hands) // length):
            fact = f"position {position} is dealt {count(times, 'time')}"
            grader.fail(fact, *gets, hint="filled up with one")


def _deal(rank: int, world_size: int, own_sampler: Callable, length: int) -> dict:
    """Deal four hands of positions, and check whether a global random state changed."""
    before = _random_states()
    sampler, reseeded = (own_sampler(range(length), seed) for seed in SEEDS)
    hands = []
    for dealer, epoch in ((sampler, 0), (sampler, 1), (sampler, 0), (reseeded, 0)):
        dealer.set_epoch(epoch)
        hands.append([operator.index(position) for position in dealer])  # it may be a tensor
    return {"hands": hands, "seeded": _random_states() != before}


def _random_states() -> list[Any]:
    _, keys, place, *_ = numpy.random.get_state()
    return [random.getstate(), torch.get_rng_state().tolist(), keys.tolist(), place]


@compared(
    "8.4",
    "average_statistics(model)",
    on_failure={RankError: {"can't be cast": "counts summed"}},
    **in_parts(OTHERS),
)
def _average_statistics(
    rank: int, world_size: int, average_statistics: Callable, part: str
) -> dict[str, torch.Tensor]:
    norm = nn.BatchNorm1d(2)
    model = DistributedDataParallel(nn.Sequential(norm))
    norm.running_mean.copy_(torch.tensor([60.0, 61.5]) * (rank + 1))
    norm.running_var.fill_(120 * (rank + 1))
    norm.num_batches_tracked.fill_(3)
    average_statistics(model)
    return {
        name: tensor.clone()
        for name, tensor in norm.state_dict().items()
        if name.startswith("running") is not bool(part)
    }


_UNREAD = {"key(s) in state_dict": "wrapper saved", "Weights only": "module saved"} | dict.fromkeys(
    ("FileNotFoundError", "EOFError", "UnpicklingError"), "read too early"
)


@compared(
    "8.5",
    "save_and_load(model, path, plain)",
    on_failure={RankError: _UNREAD, DeadlockError: "barrier on some"},
    **in_parts(NAMES, ONE_SAVES),
)
def _save_and_load(
    rank: int, world_size: int, save_and_load: Callable, part: str
) -> dict[str, Any]:
    """Save and load; rank 0 saves when another rank has tried to load, or after some time.

    A rank that does not wait then finds no file, or an empty one.
    """
    network, plain, saves = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False), []
    model, save, load = DistributedDataParallel(network), torch.save, torch.load
    nn.init.constant_(network.weight, rank + 1.0)  # so that only the file has those of rank 0
    nn.init.zeros_(plain.weight)
    limit = 0.0 if part else 1.5 if world_size == SIZES[0] else 0.2  # most show in the first run

    def noting_save(value: Any, f: Any, *args: Any, **options: Any) -> None:
        end = time.monotonic() + limit
        if not hasattr(f, "write"):  # the file is there before anything is in it
            open(f, "ab").close()
        while rank == 0 < world_size - 1 and not tried.exists() and time.monotonic() < end:
            time.sleep(0.01)
        save(value, f, *args, **options)
        saves.append(rank)

    def noting_load(*args: Any, **options: Any) -> Any:
        try:
            return load(*args, **options)
        finally:
            if rank > 0 and folder.exists():
                tried.touch()

    with shared_folder(rank) as folder:
        path, tried = folder / "network.pt", folder / "tried"
        with patch.object(torch, "save", noting_save), patch.object(torch, "load", noting_load):
            save_and_load(model, str(path), plain)
        dist.barrier()
        # Only rank 0, which removes the folder, and not too early for itself.
        saved = load(path) if rank == 0 and path.exists() else {}
    if part == NAMES:
        return {"the names in the file": list(saved)}
    if part == ONE_SAVES:
        return {"the files that this rank saves": len(saves)}
    return {"whether `path` has a file": bool(saved), "plain.weight": plain.weight.detach()}


hunt(*(f"9.{number}" for number in (1, 2, 3, 4, 5, 6, 9, 10)))
hunt("9.7", together=lambda result: [result[0]])  # what the others report does not count
hunt("9.8", spare=2)  # the fresh model may be wrapped, too


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
    return {f"the answer in epoch {n}": stop(loss / 4) for n, loss in enumerate(losses, 1)}
