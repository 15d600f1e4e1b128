"""Graders of lesson 21: flags, sums and messages in shared memory, a backend for DDP.

Ranks that share memory take turns: one runs until it has to wait, then the next. So a race does
not depend on luck: the order that shows a mistake is one of those in which they run.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.check.compared import compared
from ddp_kit.check.grader import UNCHANGED, EndlessError, Grader, drawn, exercise
from ddp_kit.check.record import Score, Span, record
from ddp_kit.error_text import count
from ddp_kit.errors import RankDiedError, RankError, RunTimeoutError
from ddp_kit.lessons import your_own_backend as lesson

LENGTH = 7  # of a tensor; no number of ranks from 2 to 5 divides it
_START = 4096  # bytes of shared memory before the slots
ROUNDS = 3  # barriers, or sums, one after the other
AGAIN = "three times in a row"
LARGE = 1_500_000  # elements: more than a slot of 4 MiB holds
_FACTORS = (1, 5, 7, 3, 2)  # of the numbers in each call, and in one that never comes
CALLS = 4  # of 21.2, so that each slot is used twice
ONE_BARRIER = "one barrier"
FEW = "few flags"
TOGETHER = "together"


class Turns:
    """Lets ranks run one at a time, so only the one whose turn it is touches shared memory.

    A rank takes its turns in a `with` block, which ends early, without an error, if no rank can go
    on. order: of the ranks that could run, the first one in it does. length: of a slot, in numbers.
    """

    def __init__(self, rank: int, order: Sequence[int], length: int = LENGTH) -> None:
        self.rank, self.order, size = rank, order, len(order)
        nbytes = _START + size * length * 4
        self.memory = _share(rank, nbytes)
        numbers = memoryview(self.memory)[:_START].cast("q")
        self._state, numbers = numbers[:3], numbers[3:]  # whose turn, version, whether stuck
        self._slept_at, self._done = numbers[:size], numbers[size : 2 * size]
        self.flags, self.counts = numbers[2 * size : 3 * size], numbers[3 * size : 4 * size]
        floats = torch.frombuffer(self.memory, dtype=torch.float32, offset=_START)
        self.table = floats.view(size, length)
        self.slots = list(self.table)

    def __enter__(self) -> None:
        """Wait for the first turn."""
        if self.rank == self.order[0]:
            self._state[0] = self.rank + 1
        self._wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Let the others run from now on."""
        self._done[self.rank] = 1
        self._pass_on()
        return kind is EndlessError

    def changed(self) -> None:
        """Note that something has changed for which others may wait."""
        self._state[1] += 1

    def pause(self) -> None:
        """Let others run until something has changed; raise EndlessError if nothing can."""
        self._slept_at[self.rank] = self._state[1] + 1
        self._pass_on()
        self._wait()

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
            raise EndlessError


class Flags:
    """The flags of 21.1, as a rank may use them: it writes its own. looked: at which ones."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.looked: set[int] = set()

    def __len__(self) -> int:
        return len(self._turns.flags)

    def __getitem__(self, rank: int) -> int:
        number = self._turns.flags.tolist()[rank]  # raises IndexError, which ends a loop over them
        self.looked.add(rank % len(self))
        return number

    def __setitem__(self, rank: int, number: int) -> None:
        own = self._turns.rank
        if rank != own:
            raise ValueError(f"rank {own} wrote the flag of rank {rank}")
        self._turns.flags[own] = number
        self._turns.changed()


def _share(rank: int, nbytes: int) -> mmap.mmap:
    """Return memory that all ranks share."""
    own = lesson.create(nbytes) if rank == 0 else None
    memory = lesson.attach(lesson.tell_all(None if own is None else lesson.address(own)))
    dist.barrier()
    if own is not None:
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
    others=(AGAIN, FEW),
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
        looked = max(end[2] for end in ends if end[0] == "met") if what == "met" else 0
        if looked > (most := (n - 1).bit_length()):
            fact = f"right, but a rank looks at {count(looked, 'other flag')}"
            grader.fail(f"{fact} where {most} would be enough", hint="all flags", part=FEW)


def _meet(rank: int, world_size: int, barrier: Callable, order: Sequence[int]) -> tuple:
    turns, number, looked = Turns(rank, order), 0, 0
    with turns:
        for number in range(1, ROUNDS + 1):
            turns.counts[rank] = number
            turns.changed()
            flags = Flags(turns)
            barrier(flags, rank, turns.pause)
            looked = max(looked, len(flags.looked - {rank}))
            missing = [each for each in range(world_size) if turns.counts[each] < number]
            if missing:
                return "early", number, missing
        return "met", number, looked
    return "stuck", number, turns.flags.tolist()


@exercise(
    "21.2",
    "all_reduce_of_two(tensor, pairs, call, rank, barrier)",
    where="on 2 ranks, whichever is faster, four times in a row",
    on_failure={RankError: "other slot"},
    cases=orders(2),
    others=(AGAIN, ONE_BARRIER),
    part=lambda order: f"rank {order[0]} is faster",
)
def _all_reduce(grader: Grader, order: list[int]) -> None:
    found = list(grader.run(_sums_of_two, order, world_size=2))
    _check_barriers(grader, found)
    for number in range(CALLS):
        here = [sums[number] for sums, _ in found]
        held, before, later = (_brought(2, each) for each in (number, number - 2, number + 1))
        mistakes = {
            UNCHANGED: list(held),
            "read too early": _on_some_rank(here, held, held + before.flip(0)),
            "written too early": _on_some_rank(here, held + later.flip(0)),
            "own slot": _on_some_rank(here, 2 * held),
            "overwritten": _on_some_rank(here, held.flip(0)),
            "other sum": True,
        }
        place = f" after call {number}"
        part = AGAIN if number else ""
        grader.compare([held.sum(0)] * 2, here, mistakes, place=place, part=part)
    if (barriers := found[0][1]) > CALLS:
        fact = f"right, but {barriers} barriers for {CALLS} sums"
        grader.fail(fact, hint="two barriers", part=ONE_BARRIER)


def _sums_of_two(
    rank: int, world_size: int, answer: Callable, order: Sequence[int]
) -> tuple[str | list, int]:
    turns, sums = Turns(rank, order, 2 * LENGTH), []
    pairs = [[slot[:LENGTH] for slot in turns.slots], [slot[LENGTH:] for slot in turns.slots]]
    with turns:
        for number in range(CALLS):
            sums.append(_numbers(rank, number))
            answer(sums[-1], pairs, number, rank, turns.meet)
        return sums, turns.counts[rank]
    return "stuck", turns.counts[rank]


def _sums(
    rank: int, world_size: int, answer: Callable, order: Sequence[int]
) -> list | tuple[str, int]:
    turns, results = Turns(rank, order), []
    with turns:
        for number in range(ROUNDS):
            tensor = _numbers(rank, number)
            results.append(answer(tensor, turns.slots, rank, turns.meet))
        return [each.clone() if isinstance(each, torch.Tensor) else each for each in results]
    return "stuck", turns.counts[rank]


def _check_barriers(grader: Grader, found: Sequence) -> None:
    stuck = [rank for rank, each in enumerate(found) if each[0] == "stuck"]
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
        found = list(grader.run(_sums, order, world_size=n))
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
    others=("a tensor larger than the room", "DDP", "several tensors", TOGETHER),
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
    wanted = [[sum(_matrix(rank) for rank in range(n)), torch.full((2,), float(n))]] * n
    here = [each["pair"] for each in found]
    several = {"mixed up": True}
    grader.compare(wanted, here, several, place=" in two tensors", part="several tensors")
    if (barriers := found[0]["barriers"]) > 3:
        fact = f"right, but {barriers} barriers for two small tensors"
        grader.fail(f"{fact} where 3 would be enough", hint="one by one", part=TOGETHER)


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
    found |= {"pair": [_matrix(rank), torch.ones(2)], "barriers": 0}
    if found["finished"]:
        model = _model()
        replica = DistributedDataParallel(model, process_group=group)
        rows = _rows(world_size)
        replica(rows[rank::world_size]).square().mean().backward()
        found["gradient"] = model.weight.grad
        before = group.segment.turn
        group.allreduce(found["pair"])
        found["barriers"] = group.segment.turn - before
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


MOST_LOOKS = 50  # in vain, before an answer is stopped
_SHORT = {"limit": 0.001}  # seconds; a look takes longer


class _Watch:
    """Pauses of a rank that waits. then: what another rank does, by the number of pauses."""

    def __init__(self, then: dict[int, Callable[[], None]]) -> None:
        self.looks: list[int] = []
        self._then = then

    def __call__(self, looks: int) -> None:
        self.looks.append(looks)
        if len(self.looks) > MOST_LOOKS:
            raise EndlessError
        time.sleep(0 if self._then else 0.005)
        self._then.get(len(self.looks), lambda: None)()


@compared(
    "21.a",
    "Flags(memory, count, limit, pause)",
    sizes=(1,),
    where="whether the flags are raised or not",
)
def _flags(rank: int, world_size: int, flags: Callable) -> dict:
    class Counted(flags):  # type: ignore[misc, valid-type]
        seen = 0

        def __getitem__(self, line: int) -> int:
            self.seen += 1
            if self.seen > 100 * MOST_LOOKS:
                raise EndlessError
            return super().__getitem__(line)

    later: dict[int, Callable[[], None]] = {
        1: lambda: some.__setitem__(1, 3),
        2: lambda: some.__setitem__(3, 2),
        4: lambda: some.__setitem__(2, 2),
    }
    watch, found = _Watch(later), {}
    some = Counted(bytearray(256), 4, 60.0, watch)
    found["a wait for flags that are raised"] = _ended(some.wait, [1, 2, 3], 2, "ranks")
    found["pauses"] = len(watch.looks)
    found["each pause gets a larger number"] = watch.looks == sorted(set(watch.looks))
    found["a wait for flags that are raised already"] = _ended(some.wait, [3, 1], 2, "ranks")
    never = Counted(bytearray(256), 4, pause=_Watch({}), **_SHORT)
    never[2] = 1
    found["a wait for flags that nobody raises"] = _ended(never.wait, range(4), 1, "ranks")
    return found


def _ended(call: Callable, *args: Any) -> str:
    """Return how a call ended."""
    try:
        call(*args)
    except EndlessError:
        return "goes on forever"
    except NotImplementedError:  # of the stub
        raise
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "returns"


@compared("21.b", "all_reduce(segment, piece)", "three times in a row", spare=1e9)
def _chunks(rank: int, world_size: int, all_reduce: Callable) -> dict:
    found: dict[str, Any] = {}
    for order in orders(world_size):
        turns = Turns(rank, order)
        about = {"rank": rank, "size": world_size, "slots": turns.slots, "written": 0, "read": 0}
        segment = SimpleNamespace(barrier=turns.meet, **about)
        with turns:
            for number, length in enumerate((4, 7, 6)):  # other lengths have other chunks
                case = f"sum {number + 1} if rank {order[0]} is the fastest"
                found[case] = "waits at a barrier to which not all ranks come"
                piece = _numbers(rank, number)[:length].clone()
                all_reduce(segment, piece)
                found[case] = piece
        found |= {"bytes written": segment.written, "bytes read": segment.read}
    return found


SENT, TAKEN = 4, 5  # lines of the two flags of the mailbox from rank 0 to rank 1


class _Mailbox:
    """The flags of 21.c, and a sender that writes a message as soon as it may.

    at_once: its messages. late: those that it has only when the receiver waits for them.
    """

    def __init__(self, at_once: list[torch.Tensor], late: list[torch.Tensor]) -> None:
        self.mail = torch.zeros(2, 2, 64, dtype=torch.uint8)
        self._numbers, self._at_once, self._late = [0] * 10, at_once, late
        self._send(at_once)

    def __getitem__(self, line: int) -> int:
        return self._numbers[line]

    def __setitem__(self, line: int, number: int) -> None:
        self._numbers[line] = number
        self._send(self._at_once)

    def wait(self, lines: Iterable[int], number: int, what: str) -> None:
        if min(self._numbers[line] for line in lines) < number:
            self._send(self._late)
        if missing := [line for line in lines if self._numbers[line] < number]:
            raise RuntimeError(f"waited for {what} {missing}")

    def _send(self, messages: list[torch.Tensor]) -> None:
        if messages and self[SENT] == self[TAKEN]:
            self.mail[0, 1].view(torch.float32)[:3] = messages.pop(0)
            self._numbers[SENT] += 1


@compared(
    "21.c",
    "recv(segment, piece, src)",
    sizes=(1,),
    where="for messages that come early, late and never",
)
def _recv(rank: int, world_size: int, recv: Callable) -> dict:
    messages = [torch.tensor([1.0, 2.0, 3.0]) * 10**number for number in range(4)]
    flags, found = _Mailbox(messages[:3], messages[3:]), {}
    about = {"rank": 1, "size": 2, "written": 0, "read": 0, "mail": flags.mail}
    segment = SimpleNamespace(flags=flags, **about)
    for number in range(1, 5):
        piece = torch.zeros(3)
        ended = _ended(recv, segment, piece, 0)
        found[f"message {number}"] = piece if ended == "returns" else ended
        found[f"the two flags after message {number}"] = [flags[SENT], flags[TAKEN]]
    found["a message that never comes"] = _ended(recv, segment, torch.zeros(3), 0)
    return found


@compared(
    "21.10", "all_to_all(segment, outputs, inputs)", "twice in a row", kind="function", spare=1e9
)
def _all_to_all(rank: int, world_size: int, all_to_all: Callable) -> dict:
    found: dict[str, Any] = {}
    lengths = torch.tensor([[0, 9, 4], [5, 2, 7], [8, 1, 3]])[:world_size, :world_size]
    for order in orders(world_size):
        turns = Turns(rank, order)
        about = {"rank": rank, "size": world_size, "slots": turns.table}
        segment = SimpleNamespace(barrier=turns.meet, **about)
        with turns:
            for number, table in enumerate((lengths, lengths.T)):
                case = f"call {number + 1} if rank {order[0]} is the fastest"
                found[case] = "waits at a barrier to which not all ranks come"
                inputs = [_numbers(rank, 0).repeat(2)[:n] + n for n in table[rank]]
                outputs = [torch.full((int(n),), -1.0) for n in table[:, rank]]
                before = turns.counts[rank]
                all_to_all(segment, outputs, inputs)
                most = 2 + 2 * -(-int(table.max()) // (LENGTH // world_size))
                found[case] = outputs
                found[f"barriers too many in {case}"] = max(turns.counts[rank] - before - most, 0)
    return found


SOCKETS = 8  # ranks, half of them on each of two sockets
_COUNT = 250_000  # numbers, 1 MB
_SHARING = 3  # collectives with which the ranks share their memory
_NEAR, _FAR, _BARRIER = 4 / 5e3, 12 / 5e3, 20.0  # microseconds of a number, and of a barrier


class _Sockets:
    """The segment of 21.11: it counts what its rank writes and reads."""

    def __init__(self, turns: Turns) -> None:
        self.rank, self._turns, self._phase = turns.rank, turns, 0
        self.accesses: list[tuple] = []  # phase, rank, kind, slot, start, end

    def write(self, slot: int, start: int, numbers: torch.Tensor) -> None:
        self._place("write", slot, start, len(numbers)).copy_(numbers)

    def read(self, slot: int, start: int, count: int) -> torch.Tensor:
        return self._place("read", slot, start, count).clone()

    def barrier(self) -> None:
        self._phase += 1
        self._turns.meet()

    def _place(self, kind: str, slot: int, start: int, count: int) -> torch.Tensor:
        if not (0 <= slot < SOCKETS and 0 <= start <= start + count <= _COUNT):
            what = f"numbers {start:,} to {start + count:,} of slot {slot}"
            raise IndexError(f"there are {SOCKETS} slots of {_COUNT:,} numbers, not {what}")
        self.accesses.append((self._phase, self.rank, kind, slot, start, start + count))
        return self._turns.slots[slot][start : start + count]


def _on_sockets(rank: int, world_size: int, all_reduce: Callable, held: list) -> tuple:
    turns = Turns(rank, range(world_size), _COUNT)
    segment, tensor = _Sockets(turns), held[rank].clone()
    with turns:
        all_reduce(segment, tensor)
        return tensor, segment.accesses
    return None, []


@record(
    "21.11",
    "all_reduce_on_two_sockets(segment, tensor)",
    "µs",
    (1000, 780, 735),
    along="µs",
    collectives=True,  # of the check, to share its memory
)
def _all_reduce_on_two_sockets(grader: Grader) -> Score:
    held = drawn(SOCKETS, _COUNT)
    found, accesses = zip(*grader.run(_on_sockets, held, world_size=SOCKETS), strict=True)
    if len(grader.collectives()) > _SHARING:
        grader.fail(f"{grader.collectives()[-1].op} was called", hint="collective")
    if any(tensor is None for tensor in found):
        fact = "a rank waits at a barrier to which not all ranks come"
        grader.fail(fact, hint="uneven barriers")
    _check_races(grader, [access for each in accesses for access in each])
    of_sockets = [sum(held[:4])] * 4 + [sum(held[4:])] * 4
    mistakes = {UNCHANGED: held, "one socket": of_sockets, "other sum": True}
    grader.compare([sum(held)] * SOCKETS, found, mistakes)
    return _microseconds(accesses)


def _check_races(grader: Grader, accesses: Sequence[tuple]) -> None:
    """Fail if a rank writes what another one writes or reads before the next barrier."""
    writes = [access for access in accesses if access[2] == "write"]
    for phase, rank, _, slot, start, end in writes:
        for also, other, kind, place, first, last in accesses:
            same = also == phase and place == slot and other != rank
            if same and max(start, first) < min(end, last):
                what = f"between the same barriers, rank {rank} writes into slot {slot}"
                grader.fail(f"{what} what rank {other} {kind}s there", hint="race")


def _microseconds(accesses: Sequence[Sequence[tuple]]) -> Score:
    spans, start = [], 0.0
    phases = 1 + max((access[0] for each in accesses for access in each), default=0)
    for phase in range(phases):
        latest = start
        for each in accesses:
            now = start
            for when, rank, kind, slot, first, last in each:
                if when == phase:
                    near = slot // 4 == rank // 4
                    end = now + (last - first) * (_NEAR if near else _FAR)
                    spans.append(Span(rank, now, end, f"{kind} {slot}"))
                    now = end
            latest = max(latest, now)
        start = latest + (_BARRIER if phase + 1 < phases else 0)
    return Score(start, spans)
