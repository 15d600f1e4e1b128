"""The milestones of project 3: an all_reduce is right, also in any order, and sends little."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_kit.check.grader import UNCHANGED, Grader, drawn, in_place, same
from ddp_kit.check.project import project
from ddp_kit.error_text import count
from ddp_kit.errors import DeadlockError, MismatchError, RankError
from ddp_kit.trace.schedule import schedule

SHAPES = ((60,), (7,), (3, 5), (), (100_003,))  # 60 divides by every world size
SMALL, LARGE = 250, 1_000_000  # float32: the smallest and the largest tensors of the mix
ORDERS = {SMALL: 40, 7: 20, LARGE: 3}  # how many random orders, by the size of the tensor
ROUNDS = {2: 1, 4: 2, 5: 4}  # by the number of ranks


class SumGrader(Grader):
    """Grades an all_reduce."""

    def check_sum(self, shape: tuple[int, ...], ranks: int) -> Any:
        """Run the answer, and fail unless each rank has the sum."""
        held = drawn(ranks, *shape)
        total, numbers = sum(held[1:], held[0]), held[0].numel()
        case = f"all_reduce of {count(numbers, 'number')}"
        result = self.run(in_place, held, world_size=ranks, case=case)
        mistakes = {
            UNCHANGED: held,
            "on rank 0 only": [total, *held[1:]],
            "too often": bool((result[0] > total).all()),
            "wrong chunks": numbers % ranks > 0,
            "wrong sum": True,
        }
        self.compare([total] * ranks, result, mistakes)
        return result


def _right(grader: SumGrader) -> None:
    for ranks in (2, 3, 4, 5):
        for shape in SHAPES:
            grader.check_sum(shape, ranks)


def _in_any_order(grader: SumGrader) -> None:
    for shape in SHAPES[:2]:  # what is wrong in every order has other reasons
        grader.check_sum(shape, 3)
    for ranks in (2, 3, 4, 5):
        [found] = grader.run(_try_orders, ranks, world_size=1)
        if found:
            numbers, seed, mistake, text = found
            grader.case = f"all_reduce of {count(numbers, 'number')} on {count(ranks, 'rank')}"
            grader.case += f", in the random order {seed}"
            grader.fail(text, hint=mistake)


def _few_bytes(grader: SumGrader) -> None:
    numbers = LARGE + 3
    for ranks in (2, 3, 4):
        grader.check_sum((numbers,), ranks)
        grader.check_sent(2 * (ranks - 1) * -(-numbers // ranks) * 4, "too many bytes")


def _few_rounds(grader: SumGrader) -> None:
    for ranks, most in ROUNDS.items():
        result = grader.check_sum((SMALL,), ranks)
        taken = schedule(result.trace).length
        if taken > most:
            mistake = "a ring" if taken == 2 * (ranks - 1) else "one after the other"
            needed = f"where {most} would be enough"
            grader.fail(f"right, but it takes {count(taken, 'round')} {needed}", hint=mistake)


def _try_orders(rank: int, world_size: int, answer: Callable, ranks: int) -> Any:
    """Return the first random order in which the answer fails, with the mistake; None if none."""
    for numbers, orders in ORDERS.items():
        held = drawn(ranks, numbers)
        total = sum(held[1:], held[0])
        for seed in range(orders):
            tensors = [each.clone() for each in held]
            found: dict[int, torch.Tensor] = {}

            def call(own: int, tensors: Any = tensors, found: Any = found) -> None:
                answer(tensors[own])
                found[own] = tensors[own].clone()
                tensors[own].fill_(torch.nan)  # as a caller may who goes on

            try:
                Ranks(ranks, seed).run(call, range(ranks))
            except Failed as error:
                return numbers, seed, error.mistake, str(error)
            for own in range(ranks):
                if not same(total, found[own]):
                    place = int((found[own] != total).nonzero()[0])
                    should = f"number {place} of rank {own} should be {total[place]:g}"
                    text = f"{should} but is {found[own][place]:g}"
                    return numbers, seed, "written too early", text
    return None


# --- ranks in one process ------------------------------------------------------------------

# They take turns in a random order that a seed repeats. A message moves at any moment after both of
# its ranks have asked for it: what is written meanwhile into the tensor that is sent is sent as
# well, and `send` lasts until then. gloo is kinder, and so hides mistakes that show on another
# backend, or on one day in a hundred.

Key = tuple[int, int, int]  # sender, receiver, tag


class Failed(Exception):
    """A run did not end as it should. mistake: its name in the .ini file."""

    def __init__(self, mistake: str, text: str) -> None:
        super().__init__(text)
        self.mistake = mistake


class _Stopped(BaseException):
    """Ends a rank whose run has failed; an answer's `except Exception` does not catch it."""


class Work:
    """An operation that a rank has started. key: the message that it is about."""

    def __init__(self, ranks: Ranks, rank: int, tensor: torch.Tensor, key: Key) -> None:
        self._ranks, self.rank, self.tensor, self.key = ranks, rank, tensor, key
        self.done = False

    def wait(self, timeout: Any = None) -> bool:
        self._ranks.pause(self)
        return True

    def is_completed(self) -> bool:
        """Return whether the message has moved, after the others had a chance to go on."""
        self._ranks.pause()
        return self.done


class Ranks:
    """Runs a function on every rank, one step of one rank after the other."""

    def __init__(self, world_size: int, seed: int) -> None:
        self._world_size, self._random = world_size, random.Random(seed)
        self._here = threading.local()
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]
        self._back = threading.Semaphore(0)
        self._waiting: list[Work | None] = [None] * world_size
        self._running = set(range(world_size))
        self._sends: dict[Key, deque[Work]] = defaultdict(deque)
        self._recvs: dict[Key, deque[Work]] = defaultdict(deque)
        self._failure: Failed | None = None

    def run(self, function: Callable[[Any], Any], given: Sequence[Any]) -> None:
        """Call the function on each rank with what is given to it; raise Failed if it fails."""
        threads = [
            threading.Thread(target=self._rank, args=(rank, function, given[rank]), daemon=True)
            for rank in range(self._world_size)
        ]
        with self._in_place_of_torch():
            for thread in threads:
                thread.start()
            while self._running and not self._failure:
                self._step()
            for rank in self._running:  # each ends at its next call
                self._turns[rank].release()
            for thread in threads:
                thread.join(10)
        if self._failure:
            raise self._failure

    @property
    def _own(self) -> int:
        """Return which rank calls."""
        if not hasattr(self._here, "rank"):
            text = "it communicates in a thread of its own, whose turn this check cannot choose"
            self._failure = self._failure or Failed("", text)
            raise SystemExit  # with which a thread ends in silence
        return self._here.rank

    def pause(self, work: Work | None = None) -> None:
        """Let another rank go on, and return in this rank's next turn, after the work is done."""
        rank = self._own
        self._waiting[rank] = work
        self._back.release()
        self._begin(rank)

    def _begin(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._failure:
            raise _Stopped

    def _rank(self, rank: int, function: Callable[[Any], Any], given: Any) -> None:
        self._here.rank = rank
        try:
            self._begin(rank)
            function(given)
        except _Stopped:
            return
        except BaseException as error:
            text = f"rank {rank} raised {type(error).__name__}: {error}"
            self._failure = self._failure or Failed("raises", text)
        self._running.discard(rank)
        self._back.release()

    def _step(self) -> None:
        """Let one rank go on to its next call, or one message move."""
        ready = [r for r in self._running if (work := self._waiting[r]) is None or work.done]
        moves = [key for key, sends in self._sends.items() if sends and self._recvs[key]]
        if not ready and not moves:
            waits = sorted(self._running)
            text = "; ".join(_describe(r, self._waiting[r]) for r in waits)
            self._failure = Failed("waits in a circle", text)
            return
        chosen = self._random.choice([*sorted(ready), *sorted(moves)])
        if isinstance(chosen, tuple):
            self._move(chosen)
        else:
            self._turns[chosen].release()
            self._back.acquire()

    def _move(self, key: Key) -> None:
        send, recv = self._sends[key].popleft(), self._recvs[key].popleft()
        if send.tensor.numel() != recv.tensor.numel() or send.tensor.dtype != recv.tensor.dtype:
            text = (
                f"rank {key[0]} sends {_kind(send.tensor)} to rank {key[1]}, which receives into "
                f"{_kind(recv.tensor)}"
            )
            self._failure = Failed("other lengths", text)
            return
        with torch.no_grad():
            recv.tensor.copy_(send.tensor.reshape(recv.tensor.shape))
        send.done = recv.done = True

    @contextmanager
    def _in_place_of_torch(self) -> Iterator[None]:
        def isend(
            tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, **more: Any
        ) -> Any:
            key = self._own, more.get("group_dst", dst), tag
            return self._post(self._sends, tensor, key)

        def irecv(
            tensor: Any, src: Any = None, group: Any = None, tag: int = 0, **more: Any
        ) -> Any:
            key = more.get("group_src", src), self._own, tag
            return self._post(self._recvs, tensor, key)

        def recv(tensor: torch.Tensor, src: int | None = None, *args: Any, **more: Any) -> Any:
            irecv(tensor, src, *args, **more).wait()
            return src

        def operation(
            op: Callable, tensor: Any, peer: int, group: Any = None, tag: int = 0
        ) -> Callable[[], Work]:
            return partial(op, tensor, peer, tag=tag)

        with patch.multiple(
            dist,
            isend=isend,
            irecv=irecv,
            send=lambda *args, **more: isend(*args, **more).wait() and None,
            recv=recv,
            P2POp=operation,
            batch_isend_irecv=lambda operations: [start() for start in operations],
            get_rank=lambda group=None: self._own,
            get_world_size=lambda group=None: self._world_size,
        ):
            yield

    def _post(self, queues: dict[Key, deque[Work]], tensor: torch.Tensor, key: Key) -> Work:
        self.pause()
        if None in key[:2]:
            raise ValueError("here each send and recv must name the other rank")
        if not (0 <= key[0] < self._world_size and 0 <= key[1] < self._world_size):
            raise ValueError(f"there is no rank {max(key[:2], key=abs)}")
        work = Work(self, self._own, tensor, key)
        queues[key].append(work)
        return work


def _describe(rank: int, work: Work | None) -> str:
    assert work is not None
    sender, receiver, _ = work.key
    to = f"to send to rank {receiver}" if rank == sender else f"for a message from rank {sender}"
    return f"rank {rank} waits {to}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.numel():,} {str(tensor.dtype).removeprefix('torch.')}"


project(
    "P3",
    "all_reduce(tensor)",
    {
        "right on 2 to 5 ranks": _right,
        "right in any order": _in_any_order,
        "no more bytes than needed": _few_bytes,
        "few rounds for small tensors": _few_rounds,
    },
    graded_by=SumGrader,
    on_failure={
        DeadlockError: "waits in a circle",
        MismatchError: "other lengths",
        RankError: "raises",
    },
    collectives=False,
)
