"""Graders of lesson 21: a barrier from flags, two sums in shared memory, a backend for DDP.

The ranks of 21.1 to 21.3 take turns: one runs until it has to wait, then the next. So a race does
not depend on luck: the order that shows a mistake is one of those in which they run.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.check.grader import UNCHANGED, Grader, exercise
from ddp_kit.errors import RankDiedError, RankError, RunTimeoutError

LENGTH = 7  # of a tensor; no number of ranks from 2 to 5 divides it
_START = 4096  # bytes of shared memory before the slots
ROUNDS = 3  # barriers, or sums, one after the other
AGAIN = "three times in a row"
LARGE = 1_500_000  # elements: more than a slot of 4 MiB holds
_FACTORS = (1, 5, 7, 3)  # of the numbers in each call, and in one that never comes


class StuckError(BaseException):
    """All ranks wait, and nothing can change any more; no `except Exception` stops it."""


class Turns:
    """Lets ranks run one at a time, so only the one whose turn it is touches shared memory.

    order: of the ranks that could run, the first one in it does.
    """

    def __init__(self, rank: int, order: Sequence[int]) -> None:
        self.rank, self.order, size = rank, order, len(order)
        nbytes = _START + size * LENGTH * 4
        self.memory = _share(rank, nbytes)
        numbers = memoryview(self.memory)[:_START].cast("q")
        self._state, numbers = numbers[:3], numbers[3:]  # whose turn, version, whether stuck
        self._slept_at, self._done = numbers[:size], numbers[size : 2 * size]
        self.flags, self.counts = numbers[2 * size : 3 * size], numbers[3 * size : 4 * size]
        floats = torch.frombuffer(self.memory, dtype=torch.float32, offset=_START)
        self.slots = list(floats.view(size, LENGTH))

    def begin(self) -> None:
        """Wait for the first turn."""
        if self.rank == self.order[0]:
            self._state[0] = self.rank + 1
        self._wait()

    def changed(self) -> None:
        """Note that something has changed for which others may wait."""
        self._state[1] += 1

    def pause(self) -> None:
        """Let others run until something has changed; raise StuckError if nothing can."""
        self._slept_at[self.rank] = self._state[1] + 1
        self._pass_on()
        self._wait()

    def end(self) -> None:
        """Let the others run from now on."""
        self._done[self.rank] = 1
        self._pass_on()

    def meet(self) -> None:
        """Wait until all ranks have called this as often."""
        self.counts[self.rank] += 1
        self.changed()
        while min(self.counts) < self.counts[self.rank]:
            self.pause()

    def _pass_on(self) -> None:
        asleep = self._state[1] + 1
        for rank in self.order:
            if not self._done[rank] and self._slept_at[rank] != asleep:
                self._state[0] = rank + 1
                return
        self._state[2] = 1

    def _wait(self) -> None:
        looks = 0
        while self._state[0] != self.rank + 1 and not self._state[2]:
            looks += 1
            time.sleep(0 if looks < 100 else 0.001)  # the run has a time limit
        if self._state[2]:
            raise StuckError


class Flags:
    """The flags of 21.1, as a rank may use them: it reads all and writes its own."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __len__(self) -> int:
        return len(self._turns.flags)

    def __getitem__(self, rank: int) -> int:
        return self._turns.flags.tolist()[rank]  # raises IndexError, which ends a loop over them

    def __setitem__(self, rank: int, number: int) -> None:
        own = self._turns.rank
        if rank != own:
            raise ValueError(f"rank {own} wrote the flag of rank {rank}")
        self._turns.flags[own] = number
        self._turns.changed()


def _share(rank: int, nbytes: int) -> mmap.mmap:
    """Return memory that all ranks share. Raises RuntimeError on systems other than Linux."""
    own, where = -1, [""]
    if rank == 0:
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("this exercise needs Linux, for os.memfd_create")
        own = os.memfd_create("exercise")
        os.ftruncate(own, nbytes)
        where = [f"/proc/{os.getpid()}/fd/{own}"]
    dist.broadcast_object_list(where, src=0)
    with open(where[0], "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), nbytes)
    dist.barrier()
    if rank == 0:
        os.close(own)
    return memory


def orders(n: int) -> list[list[int]]:
    """Return the orders in which n ranks shall take turns: the first rank first, and last."""
    ranks = list(range(n))
    return [ranks, ranks[::-1]] if n > 1 else [ranks]


def _part(number: int) -> str:
    """Return the part to which a call belongs, of 1 to ROUNDS in a row."""
    return AGAIN if number > 1 else ""


@exercise(
    "21.1",
    "barrier(flags, rank, pause)",
    "three times in a row",
    on_failure={RankError: "other flag", RunTimeoutError: "no pause"},
    others=(AGAIN,),
)
def _barrier(grader: Grader, n: int) -> None:
    for order in orders(n):
        ends = [(*end, rank) for rank, end in enumerate(grader.run(_meet, order, world_size=n))]
        what, number, detail, rank = min(ends)  # "early" before "met" and "stuck"
        if what == "early":
            missing = " and ".join(f"rank {each}" for each in detail)
            fact = f"rank {rank} left barrier {number} before {missing} had come"
            hint = "not counted" if number > 1 else "waits too little"
            grader.fail(fact, hint=hint, part=_part(number))
        if stuck := [end for end in ends if end[0] == "stuck"]:
            _, number, detail, rank = min(stuck)
            fact = f"rank {rank} never leaves barrier {number}; the flags are {detail}"
            hint = "waits too long" if any(detail) else "no flag raised"
            grader.fail(fact, hint=hint, part=_part(number))


def _meet(rank: int, world_size: int, barrier: Callable, order: Sequence[int]) -> tuple:
    turns, number = Turns(rank, order), 0
    turns.begin()
    try:
        for number in range(1, ROUNDS + 1):
            turns.counts[rank] = number
            turns.changed()
            barrier(Flags(turns), rank, turns.pause)
            missing = [each for each in range(world_size) if turns.counts[each] < number]
            if missing:
                return "early", number, missing
    except StuckError:
        return "stuck", number, turns.flags.tolist()
    finally:
        turns.end()
    return "met", number, []


@exercise(
    "21.2",
    "all_reduce(tensor, slots, rank, barrier)",
    where="on 2 ranks, whichever is faster, three times in a row",
    on_failure={RankError: "other slot"},
    cases=orders(2),
    others=(AGAIN,),
    part=lambda order: f"rank {order[0]} is faster",
)
def _all_reduce(grader: Grader, order: list[int]) -> None:
    found = list(grader.run(_sums, order, True, world_size=2))
    _check_barriers(grader, found)
    for number in range(ROUNDS):
        here = [results[number] for results in found]
        held, before, later = (_brought(2, each) for each in (number, number - 1, number + 1))
        mistakes = {
            UNCHANGED: list(held),
            "read too early": _on_some_rank(here, held, held + before.flip(0)),
            "written too early": _on_some_rank(here, held + later.flip(0)),
            "own slot": _on_some_rank(here, 2 * held),
            "overwritten": _on_some_rank(here, held.flip(0)),
            "other sum": True,
        }
        place = f" after call {number + 1}"
        grader.compare([held.sum(0)] * 2, here, mistakes, place=place, part=_part(number + 1))


def _sums(
    rank: int, world_size: int, answer: Callable, order: Sequence[int], in_place: bool
) -> list | tuple[str, int]:
    turns, results = Turns(rank, order), []
    turns.begin()
    try:
        for number in range(ROUNDS):
            tensor = _numbers(rank, number)
            returned = answer(tensor, turns.slots, rank, turns.meet)
            results.append(tensor if in_place else returned)
    except StuckError:
        return "stuck", turns.counts[rank]
    finally:
        turns.end()
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in results]


def _check_barriers(grader: Grader, found: Sequence) -> None:
    stuck = [rank for rank, each in enumerate(found) if isinstance(each, tuple)]
    if stuck:
        fact = f"rank {stuck[0]} waits at a barrier to which not all ranks come"
        grader.fail(fact, hint="uneven barriers")


def _numbers(rank: int, number: int) -> torch.Tensor:
    """Return what a rank brings to a call; sums are exact, and tell who is in them and when."""
    return torch.arange(1.0, LENGTH + 1) * 10.0**rank * _FACTORS[number]


def _brought(n: int, number: int) -> torch.Tensor:
    """Return what all ranks bring to a call, a row for each rank."""
    return torch.stack([_numbers(rank, number) for rank in range(n)])


def _on_some_rank(found: Sequence[Any], *mistaken: torch.Tensor) -> bool:
    """Return whether a rank has what a mistake gives. mistaken: with a row for each rank."""
    return any(_alike(have, rows[rank]) for rows in mistaken for rank, have in enumerate(found))


def _alike(have: Any, want: torch.Tensor) -> bool:
    return isinstance(have, torch.Tensor) and torch.equal(have, want)


@exercise(
    "21.3",
    "reduce_scatter(tensor, slots, rank, barrier)",
    f"with {LENGTH} numbers in uneven chunks",
    on_failure={RankError: "other slot"},
    others=(AGAIN,),
)
def _reduce_scatter(grader: Grader, n: int) -> None:
    for order in orders(n):
        found = list(grader.run(_sums, order, False, world_size=n))
        _check_barriers(grader, found)
        for number in range(ROUNDS):
            here = [results[number] for results in found]
            wanted = list(_brought(n, number).sum(0).tensor_split(n))
            mistakes = _mistakes_in_chunks(here, wanted, number)
            place = f" from call {number + 1}"
            grader.compare(wanted, here, mistakes, "return", place, _part(number + 1))


def _mistakes_in_chunks(found: Sequence[Any], wanted: Sequence, number: int) -> dict[str, bool]:
    n, short = len(found), LENGTH // len(found)
    held, later = _brought(n, number), _brought(n, number + 1)
    whole = held.sum(0)
    wrong = [(rank, have) for rank, have in enumerate(found) if not _alike(have, wanted[rank])]
    # What is summed if some ranks have written their next tensor.
    mixtures = [sum(rows) for rows in product(*zip(held, later, strict=True))][1:]

    def some(chunks: Callable[[int], Iterable[torch.Tensor]]) -> bool:
        return any(_alike(have, chunk) for rank, have in wrong for chunk in chunks(rank))

    return {
        "no tensor": not all(isinstance(have, torch.Tensor) for have in found),
        "whole sum": some(lambda rank: [whole]),
        "numbers left over": some(lambda rank: [whole[rank * short : (rank + 1) * short]]),
        "torch chunk": some(lambda rank: [[*whole.chunk(n), *[whole[:0]] * n][rank]]),
        "another chunk": some(lambda rank: wanted),
        "one tensor": some(lambda rank: held.tensor_split(n, dim=1)[rank]),
        "other shape": any(
            getattr(have, "shape", None) != wanted[rank].shape for rank, have in wrong
        ),
        "written too early": some(lambda rank: [each.tensor_split(n)[rank] for each in mixtures]),
        "other sum": True,
    }


@exercise(
    "21.4",
    "Backend(store, rank, size, timeout)",
    "and DDP trains on it",
    on_failure={
        RankError: "too large pieces",
        RankDiedError: "no work",
        RunTimeoutError: "too large pieces",
    },
    others=("a tensor larger than the room", "DDP"),
)
def _backend(grader: Grader, n: int) -> None:
    found = list(grader.run(_use_backend, world_size=n))
    if not all(each["finished"] for each in found):
        grader.fail("allreduce returned no Work", hint="no work")
    for name, wanted in (
        ("small", [sum(_matrix(rank) for rank in range(n))] * n),
        ("large", [torch.tensor([float(n)] * 3)] * n),
    ):
        part = "a tensor larger than the room" if name == "large" else ""
        here = [each[name] for each in found]
        pairs = zip(here, wanted, strict=True)
        mistakes = {
            UNCHANGED: [each[f"{name} before"] for each in found],
            "divided": [want / n for want in wanted],
            "first piece only": all(have[0].equal(want[0]) for have, want in pairs),
            "other sum": True,
        }
        grader.compare(wanted, here, mistakes, place=f" of the {name} tensor", part=part)
    gradients = [each["gradient"] for each in found]
    wanted = [_gradient_alone(n)] * n
    place = " in weight.grad"
    grader.compare(wanted, gradients, "only the gradient", place=place, part="DDP")


def _matrix(rank: int) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3) + 10 * rank


def _use_backend(rank: int, world_size: int, backend: Callable) -> dict[str, Any]:
    dist.Backend.register_backend("exercise", backend, devices=["cpu"])
    group = dist.new_group(backend="exercise", timeout=timedelta(seconds=30))
    small, large = _matrix(rank), torch.ones(LARGE)
    ends = torch.tensor([0, LARGE // 2, LARGE - 1])
    found: dict[str, Any] = {"small before": small.clone(), "large before": large[ends]}
    work = dist.all_reduce(small, group=group, async_op=True)
    found["finished"] = isinstance(work, dist.Work)
    if found["finished"]:
        work.wait()
        dist.all_reduce(large, group=group)
    found |= {"small": small, "large": large[ends], "gradient": None}
    if found["finished"]:
        model = _model()
        replica = DistributedDataParallel(model, process_group=group)
        rows = _rows(world_size)
        replica(rows[rank::world_size]).square().mean().backward()
        found["gradient"] = model.weight.grad
    dist.destroy_process_group(group)
    return found


def _model() -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    return model


def _rows(n: int) -> torch.Tensor:
    return torch.arange(6.0 * n).view(-1, 3)


def _gradient_alone(n: int) -> torch.Tensor:
    model = _model()
    model(_rows(n)).square().mean().backward()
    return model.weight.grad  # type: ignore[return-value]
