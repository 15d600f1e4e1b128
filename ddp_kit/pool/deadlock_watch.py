"""When a run is judged: how long nothing must have moved, and how often to look again."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ddp_kit.error_text import Frame
from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.pool.rank_handle import RankHandle, ask_for_stacks, have_processes
from ddp_kit.pool.wire.messages import Raised
from ddp_kit.trace import Snapshot, own_frame
from ddp_kit.trace.board import JOINS
from ddp_kit.trace.polling import calls_of_polling_loop
from ddp_kit.trace.rank import recorder
from ddp_kit.trace.stacks import in_standard_library
from ddp_kit.verdict import ends_by_its_limit, judge

QUIET = 0.5  # seconds in which nothing moves before a run is judged
AGAIN = 5.0  # seconds until it is judged again, then twice as many, and so on
PATIENCE = 0.3  # seconds in which a rank notices that a key was set, after it has answered


class DeadlockWatch:
    """Watches the boards of a run's ranks, and has them judged when nothing moves on them."""

    def __init__(self, ranks: Sequence[RankHandle], run: int) -> None:
        self._ranks = ranks
        self._run = run
        self._seen: object = None
        self._since = math.inf
        self._again = AGAIN
        self.notices: list[str] = []  # to be shown at once
        # Why waits can end only by their own time limit, by rank and event.
        self._limited: dict[tuple[int, int], DeadlockError] = {}
        self._said: set[str] = set()

    def look(
        self, now: float, returned: Collection[int], left_threads: Collection[int]
    ) -> DeadlockError | MismatchError | None:
        """Return why the run cannot end; None if it may. now: seconds.

        returned: the ranks that have returned; left_threads: those of them that have left a thread
        of the worker running, which may send.
        """
        heads = [rank.board.head() for rank in self._ranks]
        seen = [head.moves for head in heads], len(returned)
        if seen != self._seen:
            self._seen, self._since, self._again = seen, now, AGAIN
            return None
        if now - self._since < QUIET:
            return None
        # A thread that keeps the run from being judged may end; asking costs room on the board.
        self._since, self._again = now + self._again - QUIET, 2 * self._again
        if all(head.waiting < 0 and not head.bits & JOINS for head in heads):
            return None
        snapshots = [Snapshot(n, rank.board.read()) for n, rank in enumerate(self._ranks)]
        if any(snapshot.log.head.run != self._run for snapshot in snapshots):
            return None  # a rank has not begun
        error = judge(snapshots, returned)
        if error is not None:
            return self._confirm(error, snapshots, left_threads)
        self._note_limited(snapshots, returned, left_threads)
        return None

    def _note_limited(
        self,
        snapshots: Sequence[Snapshot],
        returned: Collection[int],
        left_threads: Collection[int],
    ) -> None:
        """Note waits that only their own time limit can end; a rank may go on after that."""
        why = ends_by_its_limit(snapshots, returned)
        if why is None:
            return
        stuck = [snapshots[wait.rank] for wait in why.waits]
        waits = {(each.rank, each.waits[0].index) for each in stuck if not each.waits_forever}
        if waits <= self._limited.keys():
            return
        confirmed = self._confirm(why, snapshots, left_threads)
        if isinstance(confirmed, DeadlockError):
            self._limited |= dict.fromkeys(waits, confirmed)
            if confirmed.fact not in self._said:  # it may try again and again
                self._said.add(confirmed.fact)
                self.notices.append(confirmed.fact)

    def why_raised(
        self, snapshots: Sequence[Snapshot], raised: Mapping[int, Raised]
    ) -> DeadlockError | None:
        """Return why ranks raised, if a wait did whose end was certain to be its time limit.

        raised: what they have reported, by rank.
        """
        for rank, reply in sorted(raised.items()) if self._limited else ():
            wait, last = reply.inside, snapshots[rank].last_wait
            error = self._limited.get((rank, last.index)) if last else None
            if last and error and wait and (wait.op, wait.where) == (last.call, last.where):
                return error
        return None

    def _confirm(
        self,
        error: DeadlockError | MismatchError,
        snapshots: Sequence[Snapshot],
        left_threads: Collection[int],
    ) -> DeadlockError | MismatchError | None:
        """Return the error if nothing but the ranks' waits decides how they go on."""
        waits = {snapshot.rank: snapshot.waits for snapshot in snapshots if snapshot.waits}
        keys = any(event.kind == "key" for events in waits.values() for event in events)
        numbers = range(len(snapshots)) if keys else sorted(waits.keys() | set(left_threads))
        answers = ask_for_stacks([self._ranks[number] for number in numbers])
        for number, stacks in zip(numbers, answers, strict=True):
            snapshot = snapshots[number]
            known = len(snapshot.thread_waits) if number in waits else 0
            if _may_go_on(stacks, known, snapshot.joins):
                return None
            if snapshot.polls and not _polls(stacks[0]):
                return None
        if keys and not self._keys_stay_unset(snapshots):
            return None
        if isinstance(error, DeadlockError):
            return _located(error, dict(zip(numbers, answers, strict=True)))
        return error

    def _keys_stay_unset(self, snapshots: Sequence[Snapshot]) -> bool:
        """Return whether nobody sets the keys that ranks wait for, or has just set them."""
        mine = threading.get_ident()
        frames = [frame for thread, frame in sys._current_frames().items() if thread != mine]
        if any(map(own_frame, frames)) or have_processes(self._ranks):
            return False  # code in no rank may have the store, too
        # All ranks have answered. Whoever waits for a key that was set would move by now.
        time.sleep(PATIENCE)
        return all(self._ranks[each.rank].board.head() == each.log.head for each in snapshots)


def _may_go_on(stacks: list[list[Frame]], waits: int = 0, joins: bool = False) -> bool:
    """Return whether another thread of a rank with these stacks may communicate.

    waits: how many of them wait for operations that were judged. joins: the worker's own thread
    waits until threads go on, so it counts whatever another one does.
    """
    if not stacks:
        return True
    others = [stack for stack in stacks[1:] if not any(map(_is_wait, stack))]
    if len(stacks) - 1 - len(others) != waits:
        others = stacks[1:]
    return any(_may_communicate(stack) or (joins and not _is_idle(stack)) for stack in others)


def _may_communicate(stack: list[Frame]) -> bool:
    """Return whether a thread may run the worker's code, or call what the worker has passed on.

    A thread that only the standard library has on its stack may do so next, as a Timer or a thread
    pool does. A package's own thread, which watches something, does not.
    """
    if any(frame.own or frame.file.endswith(_COLLECTIVES) for frame in stack):
        return True
    stack = [frame for frame in stack if not frame.file.startswith(_RECORDER)]
    if not stack or not all(in_standard_library(frame.file) for frame in stack):
        return False
    return not _is_idle(stack)


def _is_idle(stack: list[Frame]) -> bool:
    """Return whether a thread only helps others, or waits for work; or it belongs to the kit."""
    places = [(os.path.basename(frame.file), frame.function) for frame in stack]
    helps = any(place in _HELPERS for place in places)
    if helps or any(frame.file == _WATCHES_PARENT for frame in stack):
        return True
    waits = itertools.dropwhile(("threading.py", "wait").__eq__, places)
    return next(waits, None) in _IDLE


def _is_wait(frame: Frame) -> bool:
    return frame.function == "block" and frame.file.startswith(_RECORDER)


def _located(error: DeadlockError, stacks: dict[int, list[list[Frame]]]) -> DeadlockError:
    """Return the error with the line of the worker where a thread has no line of its own."""
    waits = [
        wait if wait.where else replace(wait, where=_own_line(stacks[wait.rank][0]))
        for wait in error.waits
    ]
    return DeadlockError(error.fact, waits, error.hint, error.returned)


def _own_line(stack: list[Frame]) -> Frame | None:
    return next((frame for frame in stack if frame.own), None)


def _polls(stack: list[Frame]) -> bool:
    """Return whether a thread is in a loop that ends only when an operation is complete."""
    own = _own_line(stack)
    return own is not None and calls_of_polling_loop(own.file, own.line) is not None


_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_RECORDER = os.path.join(os.path.dirname(recorder.__file__), "")
_WATCHES_PARENT = os.path.join(os.path.dirname(__file__), "rank", "bootstrap.py")
# File and function of threads of the standard library that only move data for others, and of those
# that wait for work, which the rank's stuck main thread cannot give them.
_HELPERS = {
    ("queues.py", "_feed"),
    *(("pool.py", name) for name in ("_handle_workers", "_handle_tasks", "_handle_results")),
}
_IDLE = {("thread.py", "_worker"), ("pool.py", "worker"), ("queue.py", "get")}
