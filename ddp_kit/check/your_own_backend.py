"""Graders of lesson 21: flags, sums and messages in shared memory, a backend for DDP.

Ranks that share memory take turns: of those that can go on, the first one in an order does, until
it has to wait, or lets a faster one go on. So a race does not depend on luck.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.check.compared import alone, compared, in_parts
from ddp_kit.check.grader import UNCHANGED, EndlessError, Grader, drawn
from ddp_kit.check.record import Score, Span, record
from ddp_kit.error_text import count
from ddp_kit.errors import RankDiedError, RankError, RunTimeoutError
from ddp_kit.lessons import your_own_backend as lesson
from ddp_kit.trace import unrecorded

LENGTH = 7  # of a tensor; no number of ranks from 2 to 5 divides it
AGAIN, FEW, ONE_BARRIER = "called again and again", "few flags", "one barrier"
LARGER, DDP, SEVERAL = "a tensor larger than the room", "DDP", "several tensors"
TOGETHER = "together"
STUCK = "a rank waits for the others forever"
_FACTORS = 1, 5, 7, 3  # of the numbers in each call


class Turns:
    """Lets ranks run one at a time. The memory that they share goes with the turn.

    A rank takes its turns in a `with` block, which ends early, without an error, if no rank can go
    on. order: of the ranks that can go on, the first one in it does. length: of a slot, in numbers.
    """

    def __init__(self, rank: int, order: Sequence[int], length: int = LENGTH) -> None:
        self.rank, self.order, n = rank, order, len(order)
        self._memory = torch.zeros(1 + 2 * n + 3 * n * n + n * length)
        parts = self._memory.split([1, n, n, 3 * n * n, n * length])
        self._changes, self._seen, self.counts, self.flags, slots = parts  # -1 changes at the end
        self._changes += 1
        self.slots = slots.view(n, length)

    @property
    def stuck(self) -> bool:
        """Whether some ranks had to wait when the block ended."""
        return bool(self._seen.isfinite().any())

    def __enter__(self) -> Turns:
        """Wait for the first turn."""
        if self.rank != self.order[0]:
            self._wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Let the others run to the end."""
        if self._changes > 0:
            self._seen[self.rank] = math.inf
            self._pass_on()
        return kind is EndlessError

    def changed(self) -> None:
        """Let all see that something has changed for which they may wait."""
        self._changes += 1
        self._pass_on()

    def pause(self) -> None:
        """Let others run until something has changed; raise EndlessError if nothing can."""
        self._seen[self.rank] = self._changes
        self._pass_on()

    def meet(self) -> None:
        """Wait until all ranks have called this as often."""
        self.counts[self.rank] += 1
        self.changed()
        while self.counts.min() < self.counts[self.rank]:
            self.pause()

    def _pass_on(self) -> None:
        able = [rank for rank in self.order if self._seen[rank] < self._changes]
        if not able:
            self._changes.fill_(-1)
        for rank in able[:1] or self.order:
            if rank != self.rank:
                with unrecorded():
                    dist.send(self._memory, rank)
        if able[:1] != [self.rank]:
            self._wait(bool(able))

    def _wait(self, receive: bool = True) -> None:
        with unrecorded():
            if receive:
                dist.recv(self._memory)
        if self._changes < 0 and self._seen[self.rank].isfinite():
            raise EndlessError


def in_turns(
    rank: int, n: int, calls: int, call: Callable[[Turns, int], Any], length: int = LENGTH
) -> dict[str, Any]:
    """Return what `call(turns, number)` returns each time, with either end as fastest."""
    found: dict[str, Any] = {}
    for order in (range(n), range(n)[::-1]):
        names = [f"call {number + 1} if rank {order[0]} is the fastest" for number in range(calls)]
        with Turns(rank, order, length) as turns:
            for number, name in enumerate(names):
                found[name] = call(turns, number)
        if turns.stuck:
            raised = turns.flags[:n].int().tolist()  # in 21.1
            found |= dict.fromkeys(
                names, f"{STUCK}; the flags are {raised}" if any(raised) else STUCK
            )
    return found


def _numbers(rank: int, number: int) -> torch.Tensor:
    """Return what a rank brings to a call; sums are exact, and tell who is in them and when."""
    return torch.arange(1.0, LENGTH + 1) * 10.0**rank * _FACTORS[number]


def _at_most(most: int, used: float, noun: str, value: Any) -> Any:
    """Return the value, or how much too much was used for it."""
    return value if used <= most else f"right, but {count(int(used), noun)} in place of {most}"


class Flags:
    """The flags of 21.1 and 21.c. own: the only one that the rank may write. looked: at which."""

    def __init__(self, turns: Turns, length: int, own: int) -> None:
        self._turns, self._length, self._own = turns, length, own
        self.looked: set[int] = set()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, line: int) -> int:
        number = self._turns.flags[: len(self)].tolist()[line]  # IndexError ends a loop over them
        self.looked.add(line % len(self))
        return int(number)

    def __setitem__(self, line: int, number: int) -> None:
        if line != self._own:
            raise ValueError(f"rank {self._turns.rank} wrote flag {line}, which is not its own")
        self._turns.flags[line] = number
        self._turns.changed()

    def wait(self, lines: Iterable[int], number: int, what: str) -> None:
        """Wait until no flag is smaller."""
        while min(self[line] for line in lines) < number:
            self._turns.pause()


@compared(
    "21.1",
    "barrier(flags, rank, pause)",
    "three times in a row",
    on_failure={RankError: "other flag", RunTimeoutError: "no pause"},
    **in_parts(AGAIN, FEW),
)
def _barrier(rank: int, world_size: int, barrier: Callable, part: str) -> dict:
    def call(turns: Turns, number: int) -> str:
        turns.counts[rank] += 1
        flags = Flags(turns, world_size, rank)
        barrier(flags, rank, turns.pause)
        late = [f"rank {other}" for other in range(world_size) if turns.counts[other] <= number]
        if late:
            return f"left before {' and '.join(late)} had come"
        most = (world_size - 1).bit_length() if part == FEW else world_size
        return _at_most(most, len(flags.looked - {rank}), "other flag", "left when all had come")

    return in_turns(rank, world_size, 3 if part else 1, call)


@compared(
    "21.2",
    "all_reduce_of_two(tensor, pairs, call, rank, barrier)",
    where="on 2 ranks, whichever is faster, four times in a row",
    on_failure={RankError: "other slot"},
    **in_parts(AGAIN, ONE_BARRIER, sizes=(2,)),
)
def _all_reduce(rank: int, world_size: int, all_reduce_of_two: Callable, part: str) -> dict:
    def call(turns: Turns, number: int) -> Any:
        tensor, pairs = _numbers(rank, number), turns.slots.view(2, 2, LENGTH).transpose(0, 1)
        all_reduce_of_two(tensor, pairs, number, rank, turns.meet)
        most = (number + 1) * (1 if part == ONE_BARRIER else 9)
        return _at_most(most, turns.counts[rank].item(), "barrier", tensor)

    return in_turns(rank, world_size, 4 if part else 1, call, 2 * LENGTH)


@compared(
    "21.3",
    "reduce_scatter(tensor, slots, rank, barrier)",
    f"with {LENGTH} numbers in uneven chunks",
    on_failure={RankError: "other slot"},
    **in_parts(AGAIN),
)
def _reduce_scatter(rank: int, world_size: int, reduce_scatter: Callable, part: str) -> dict:
    def call(turns: Turns, number: int) -> Any:
        return reduce_scatter(_numbers(rank, number), list(turns.slots), rank, turns.meet)

    return in_turns(rank, world_size, 3 if part else 1, call)


@compared(
    "21.4",
    "Backend(store, rank, size, timeout)",
    "and DDP trains on it",
    on_failure={
        RankError: {
            "'NoneType'": "no work",
            "attribute 'wait'": "no work",
            " of put": "too large pieces",
        },
        RankDiedError: "no work",
        RunTimeoutError: "too large pieces",
    },
    **in_parts(LARGER, DDP, SEVERAL, TOGETHER),
)
def _backend(rank: int, world_size: int, backend: Callable, part: str) -> Any:
    dist.Backend.register_backend("exercise", backend, devices=["cpu"])
    group = dist.new_group(backend="exercise", timeout=timedelta(seconds=30))
    tensors = [torch.arange(6.0).view(2, 3) + 10 * rank]
    if part == DDP:
        model = torch.nn.Linear(3, 2, bias=False)
        torch.nn.init.constant_(model.weight, 0.5)
        DistributedDataParallel(model, process_group=group)(tensors[0]).square().mean().backward()
        return {"weight.grad": model.weight.grad}
    if part in (SEVERAL, TOGETHER):
        tensors += [torch.ones(2), torch.full((3,), 2.0 + rank)]
        before = group.segment.turn
        group.allreduce(tensors)
        most = 3 if part == TOGETHER else 99
        return _at_most(most, group.segment.turn - before, "barrier", tensors)
    if part == LARGER:
        tensors = [torch.ones(1_500_000, dtype=torch.float64)]
    dist.all_reduce(tensors[0], group=group, async_op=True).wait()
    return tensors[0][:: 749_999 if part else 1]


@alone("21.a", "Flags(memory, count, limit, pause)", "whether the flags are raised or not")
def _flags(flags: Callable) -> dict:
    found: dict[str, Any] = {}
    later = {1: (1, 3), 2: (3, 2), 40: (2, 2)}  # which flag is raised to what in a pause

    def wait(what: str, number: int, limit: float) -> None:
        looks: list[int] = []

        def pause(count: int) -> None:
            looks.append(count)
            if len(looks) > 50:
                raise EndlessError
            time.sleep(0.002)
            if number == 2 and len(looks) in later:
                some.__setitem__(*later[len(looks)])

        some = flags(bytearray(256), 4, limit, pause)
        some[2] = 1
        found[f"a wait for flags that are {what}"] = _ended(some.wait, [1, 2, 3], number, "ranks")
        if number != 1:
            found[f"the pauses for flags that are {what}"] = len(looks)
            found[f"{what}: each pause gets a larger number"] = looks == sorted(set(looks))

    wait("raised", 2, 2.0)
    wait("raised already", 0, 2.0)
    wait("never raised", 1, 0.001)
    return found


def _ended(call: Callable, *args: Any) -> str:
    """Return how a call ended."""
    try:
        call(*args)
    except EndlessError:
        return "goes on forever"
    except NotImplementedError:  # of the stub
        raise
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "returns"


@compared("21.b", "all_reduce(segment, piece)", "three times in a row", spare=None)
def _chunks(rank: int, world_size: int, all_reduce: Callable) -> dict:
    segment = SimpleNamespace(rank=rank, size=world_size, written=0, read=0)

    def call(turns: Turns, number: int) -> torch.Tensor:
        segment.slots, segment.barrier = list(turns.slots), turns.meet
        piece = _numbers(rank, number)[: (4, 7, 6)[number]].clone()  # other lengths, other chunks
        all_reduce(segment, piece)
        return piece

    found = in_turns(rank, world_size, 3, call)
    return found | {"bytes written": segment.written, "bytes read": segment.read}


@compared(
    "21.c",
    "recv(segment, piece, src)",
    sizes=(2,),
    where="for messages that come early, late and never",
    spare=None,
)
def _recv(rank: int, world_size: int, recv: Callable) -> dict:
    def call(turns: Turns, number: int, messages: int = 3) -> Any:
        about = {"rank": rank, "size": 2, "mail": turns.slots.view(2, 2, LENGTH)}
        segment, piece = SimpleNamespace(written=0, read=0, **about), _numbers(rank, number)
        _, *flags = lesson.mailbox(segment, 0, 1, piece)  # those of sender and receiver
        segment.flags = Flags(turns, 10, flags[rank])
        if rank == 1:
            recv(segment, piece, 0)
        elif number < messages:
            lesson.send(segment, piece, 1)
        return [piece, segment.read]

    never = in_turns(rank, 2, 1, partial(call, messages=0), 2 * LENGTH)
    return in_turns(rank, 2, 3, call, 2 * LENGTH) | {
        "a message that never comes": list(never.values())
    }


@compared(
    "21.10", "all_to_all(segment, outputs, inputs)", "twice in a row", kind="function", spare=None
)
def _all_to_all(rank: int, world_size: int, all_to_all: Callable) -> dict:
    lengths = torch.tensor([[0, 9, 4], [5, 2, 7], [8, 1, 3]])[:world_size, :world_size]

    def call(turns: Turns, number: int) -> Any:
        about = {"rank": rank, "size": world_size, "slots": turns.slots}
        table, before = lengths.T // 2 if number else lengths, turns.counts[rank].item()
        inputs = [_numbers(rank, 0).repeat(2)[:n] + n for n in table[rank]]
        outputs = [torch.full((int(n),), -1.0) for n in table[:, rank]]
        all_to_all(SimpleNamespace(barrier=turns.meet, **about), outputs, inputs)
        most = 2 + 2 * -(-int(table.max()) // (LENGTH // world_size))
        return _at_most(most, turns.counts[rank].item() - before, "barrier", outputs)

    return in_turns(rank, world_size, 2, call)


SOCKETS = 8  # ranks, half of them on each of two sockets
_COUNT = 2000  # numbers, which stand for 1 MB
_NEAR, _FAR, _BARRIER = 200 / _COUNT, 600 / _COUNT, 20.0  # microseconds of a number; of a barrier


class Access(NamedTuple):
    """What a rank writes or reads, after so many barriers."""

    barriers: int
    rank: int
    kind: str
    slot: int
    start: int
    end: int


class _Sockets:
    """The segment of 21.11: it notes what its rank writes and reads."""

    def __init__(self, turns: Turns) -> None:
        self.rank, self._turns, self._barriers = turns.rank, turns, 0
        self.accesses: list[Access] = []

    def write(self, slot: int, start: int, numbers: torch.Tensor) -> None:
        self._place("write", slot, start, len(numbers)).copy_(numbers)

    def read(self, slot: int, start: int, count: int) -> torch.Tensor:
        return self._place("read", slot, start, count).clone()

    def barrier(self) -> None:
        self._barriers += 1
        self._turns.meet()

    def _place(self, kind: str, slot: int, start: int, count: int) -> torch.Tensor:
        access = Access(self._barriers, self.rank, kind, slot, start, start + count)
        self.accesses.append(access)
        return self._turns.slots[slot][start : access.end]


def _on_sockets(rank: int, world_size: int, all_reduce: Callable, held: list) -> tuple:
    turns, tensor = Turns(rank, range(world_size), _COUNT), held[rank].clone()
    segment = _Sockets(turns)
    with turns:
        all_reduce(segment, tensor)
    return tensor, segment.accesses, turns.stuck


@record(
    "21.11",
    "all_reduce_on_two_sockets(segment, tensor)",
    "µs",
    (1000, 780, 735),
    along="µs",
)
def _all_reduce_on_two_sockets(grader: Grader) -> Score:
    held = drawn(SOCKETS, _COUNT)
    found, accesses, stuck = zip(*grader.run(_on_sockets, held, world_size=SOCKETS), strict=True)
    if any(stuck):
        grader.fail(STUCK, hint="uneven barriers")
    every = [access for each in accesses for access in each]
    for one, other in product(every, every):
        same = one.barriers == other.barriers and one.slot == other.slot and one.rank != other.rank
        if same and one.kind == "write" and max(one.start, other.start) < min(one.end, other.end):
            what = f"between the same barriers, rank {one.rank} writes into slot {one.slot}"
            grader.fail(f"{what} what rank {other.rank} {other.kind}s there", hint="race")
    of_sockets = [sum(held[:4])] * 4 + [sum(held[4:])] * 4
    mistakes = {UNCHANGED: held, "one socket": of_sockets, "other sum": True}
    grader.compare([sum(held)] * SOCKETS, found, mistakes)
    return _microseconds(every)


def _microseconds(accesses: Sequence[Access]) -> Score:
    spans, start = [], 0.0
    for barriers in range(1 + max(access.barriers for access in accesses)):
        ends = [start + _BARRIER * (barriers > 0)] * SOCKETS
        for _, rank, kind, slot, first, last in (a for a in accesses if a.barriers == barriers):
            begin, near = ends[rank], slot // 4 == rank // 4
            ends[rank] += (last - first) * (_NEAR if near else _FAR)
            spans.append(Span(rank, begin, ends[rank], f"{kind} {slot}"))
        start = max(ends)
    return Score(start, spans)
