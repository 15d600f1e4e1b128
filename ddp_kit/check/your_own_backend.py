"""Graders of lesson 21: a barrier from flags, two sums in shared memory, a backend for DDP.

The ranks of 21.1 to 21.3 take turns: one runs until it has to wait, then the next. So a race does
not depend on luck: the order that shows a mistake is one of those in which they run.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
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


_FIRST = "Raise flags[rank] first. Then wait until the flag of every rank has been raised."
_AGAIN = (
    "The flags still have what the barrier before has left there. Count: add 1 to flags[rank] in "
    "each barrier, and wait while any flag is smaller than that."
)
_AHEAD = (
    "A fast rank may be in the next barrier already. Its flag is larger then, or set back: wait "
    "while a flag is smaller than your own, and never set it back."
)
_SILENT = "No rank has changed its flag: raise flags[rank] before you wait."


def _part(number: int) -> str:
    """Return the part to which a call belongs, of 1 to ROUNDS in a row."""
    return AGAIN if number > 1 else ""


@exercise(
    "21.1",
    "barrier(flags, rank, pause)",
    "three times in a row",
    on_failure={
        RankError: "flags[r] is the number of rank r; write only flags[rank]. Return nothing.",
        RunTimeoutError: "Call pause() each time that you have looked in vain, or the loop holds "
        "the core that another rank needs.",
    },
    others=(AGAIN,),
)
def _barrier(grader: Grader, n: int) -> None:
    for order in orders(n):
        ends = [(*end, rank) for rank, end in enumerate(grader.run(_meet, order, world_size=n))]
        what, number, detail, rank = min(ends)  # "early" before "met" and "stuck"
        if what == "early":
            missing = " and ".join(f"rank {each}" for each in detail)
            fact = f"rank {rank} left barrier {number} before {missing} had come"
            grader.fail(fact, hint=_AGAIN if number > 1 else _FIRST, part=_part(number))
        if stuck := [end for end in ends if end[0] == "stuck"]:
            _, number, detail, rank = min(stuck)
            fact = f"rank {rank} never leaves barrier {number}; the flags are {detail}"
            grader.fail(fact, hint=_AHEAD if any(detail) else _SILENT, part=_part(number))


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


_IN_SLOTS = "slots[r] is the slot of rank r, a tensor of the same shape as yours."
_WRITTEN = "A rank has read a slot before it was written: wait at a barrier between the two."
_READ = (
    "A rank has written its next tensor into its slot before the other had read this one: wait at "
    "a barrier after reading, too."
)


@exercise(
    "21.2",
    "all_reduce(tensor, slots, rank, barrier)",
    where="on 2 ranks, whichever is faster, three times in a row",
    on_failure={RankError: _IN_SLOTS},
    cases=orders(2),
    others=(AGAIN,),
    part=lambda order: f"rank {order[0]} is faster",
)
def _all_reduce(grader: Grader, order: list[int]) -> None:
    found = list(grader.run(_sums, order, True, world_size=2))
    _check_barriers(grader, found)
    for number in range(ROUNDS):
        held = [_numbers(rank, number) for rank in range(2)]
        here = [results[number] for results in found]
        hints = {UNCHANGED: held, _hint_for_sum(here, held, number): True}
        place = f" after call {number + 1}"
        grader.compare([sum(held)] * 2, here, hints, place=place, part=_part(number + 1))


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
        grader.fail(fact, hint="All ranks must call barrier() equally often, in each call.")


def _numbers(rank: int, number: int) -> torch.Tensor:
    """Return what a rank brings to a call; sums are exact, and tell who is in them and when."""
    return torch.arange(1.0, LENGTH + 1) * 10.0**rank * _FACTORS[number]


def _hint_for_sum(found: Sequence[Any], held: Sequence[torch.Tensor], number: int) -> str:
    for rank, have in enumerate(found):
        other, own = 1 - rank, held[rank]
        if _alike(have, own) or (number and _alike(have, own + _numbers(other, number - 1))):
            return _WRITTEN
        if _alike(have, own + _numbers(other, number + 1)):
            return _READ
        if _alike(have, 2 * own):
            return "That is twice a rank's own tensor: read slots[1 - rank]."
        if _alike(have, held[other]):
            return "That is the tensor of the other rank. Add it to your own."
    return (
        "Write the tensor into slots[rank], wait, add slots[1 - rank] to the tensor in place, and "
        "wait again. Leave the slots as they are, because the other rank reads them."
    )


def _alike(have: Any, want: torch.Tensor) -> bool:
    return isinstance(have, torch.Tensor) and torch.equal(have, want)


@exercise(
    "21.3",
    "reduce_scatter(tensor, slots, rank, barrier)",
    f"with {LENGTH} numbers in uneven chunks",
    on_failure={RankError: _IN_SLOTS},
    others=(AGAIN,),
)
def _reduce_scatter(grader: Grader, n: int) -> None:
    for order in orders(n):
        found = list(grader.run(_sums, order, False, world_size=n))
        _check_barriers(grader, found)
        for number in range(ROUNDS):
            held = [_numbers(rank, number) for rank in range(n)]
            here = [results[number] for results in found]
            wanted = list(sum(held).tensor_split(n))
            hint = _hint_for_chunks(here, held, number)
            place = f" from call {number + 1}"
            grader.compare(wanted, here, hint, "return", place, _part(number + 1))


def _hint_for_chunks(found: Sequence[Any], held: Sequence[torch.Tensor], number: int) -> str:
    n, whole = len(held), torch.stack(list(held)).sum(0)
    floor = LENGTH // n
    for rank, have in enumerate(found):
        if not isinstance(have, torch.Tensor):
            return "Return this rank's chunk of the sum, a tensor."
        ceiling = whole.chunk(n)
        right = whole.tensor_split(n)[rank]
        if _alike(have, right):
            continue
        if n > 1 and _alike(have, whole):
            return "That is the whole sum. Each rank sums and returns its own chunk alone."
        if _alike(have, whole[rank * floor : (rank + 1) * floor]):
            return "The numbers that are left over belong to a chunk, too: use tensor_split."
        if rank >= len(ceiling) or _alike(have, ceiling[rank]):
            return (
                "torch.chunk makes all chunks but the last equally long, and perhaps fewer than "
                "there are ranks: use tensor_split."
            )
        if any(_alike(have, other) for other in whole.tensor_split(n)):
            return "That is the chunk of another rank: rank r has chunk r."
        if any(_alike(have, each.tensor_split(n)[rank]) for each in held):
            return f"That is the chunk of one rank. Add those of all. {_WRITTEN}"
        if have.shape != right.shape:
            return "The chunks of tensor_split(len(slots)) are right; rank r has chunk r."
        later = [_numbers(each, number + 1) for each in range(n)]
        mixed = [sum(parts) for parts in _mixtures(held, later, rank)]
        if any(_alike(have, each) for each in mixed):
            return _READ
    return (
        f"{_WRITTEN} Sum chunk rank of every slot into a new tensor, and wait again before you "
        "return, so that no slot is written while another rank reads it."
    )


def _mixtures(held: Sequence, later: Sequence, rank: int) -> list[list[torch.Tensor]]:
    """Return the summands of a chunk if some other ranks have written their next tensor."""
    n = len(held)
    chosen = [[bool(mask >> each & 1) for each in range(n)] for mask in range(1, 2**n)]
    return [
        [(later if new else held)[each].tensor_split(n)[rank] for each, new in enumerate(mask)]
        for mask in chosen
    ]


_PIECES = (
    "all_reduce(self.segment, piece) takes a flat tensor of at most ROOM bytes. Cut each "
    "tensor into pieces: tensor.view(-1).split(...) counts numbers, of tensor.itemsize bytes."
)


_WORK = "PyTorch waits for what allreduce returns: return Finished(tensors)."


@exercise(
    "21.4",
    "Backend(store, rank, size, timeout)",
    "and DDP trains on it",
    on_failure={RankError: _PIECES, RankDiedError: _WORK, RunTimeoutError: _PIECES},
    others=("a tensor larger than the room", "DDP"),
)
def _backend(grader: Grader, n: int) -> None:
    found = list(grader.run(_use_backend, world_size=n))
    if not all(each["finished"] for each in found):
        grader.fail("allreduce returned no Work", hint=_WORK)
    for name, wanted in (
        ("small", [sum(_matrix(rank) for rank in range(n))] * n),
        ("large", [torch.tensor([float(n)] * 3)] * n),
    ):
        part = "a tensor larger than the room" if name == "large" else ""
        here = [each[name] for each in found]
        held = [each[f"{name} before"] for each in found]
        hints = {
            UNCHANGED: held,
            "That is the mean. PyTorch asks for the sum, and DDP divides by itself.": (
                [want / n for want in wanted]
            ),
            "Only the beginning is summed. Go through all pieces of the tensor.": all(
                have[0].equal(want[0]) for have, want in zip(here, wanted, strict=True)
            ),
            "Call all_reduce(self.segment, piece) once for each piece of each tensor.": True,
        }
        grader.compare(wanted, here, hints, place=f" of the {name} tensor", part=part)
    hint = "DDP divides by the number of ranks itself: allreduce must return the plain sum."
    gradients = [each["gradient"] for each in found]
    wanted = [_gradient_alone(n)] * n
    grader.compare(wanted, gradients, hint, place=" in weight.grad", part="DDP")


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
