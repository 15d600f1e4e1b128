"""When a run is judged: how long nothing must have moved, and how often to look again."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ddp_kit.error_text import Frame
from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.pool.rank_handle import RankHandle, ask_for_stacks
from ddp_kit.trace import Snapshot
from ddp_kit.trace.board import Head
from ddp_kit.trace.stacks import in_standard_library
from ddp_kit.verdict import judge

QUIET = 0.5  # seconds in which nothing moves before a run is judged
QUIET_RANK = 1.0  # seconds in which a rank does not move before it is judged while others move
AGAIN = 5.0  # seconds until they are judged again, then twice as many, and so on
SHARE = 0.05  # of the time, at most, is spent on judging a run in which something moves


class Others(Protocol):
    """The ranks of other hosts; see `pool.other_hosts`."""

    boards: Sequence[Any]  # one for each rank, with the methods of Board that only read

    def ask_for_stacks(self, ranks: Sequence[int]) -> list[list[list[Frame]]] | None:
        """Return which lines ranks run; None if one has moved or does not answer."""


class DeadlockWatch:
    """Watches the boards of a run's ranks, and judges the ranks on whose boards nothing moves.

    ranks: those of this host. others: those of other hosts, whose numbers follow.
    """

    def __init__(self, ranks: Sequence[RankHandle], run: int, others: Others | None = None) -> None:
        self._ranks, self._others = ranks, others
        self._boards = [*(rank.board for rank in ranks), *(others.boards if others else ())]
        self._run = run
        self._seen: list[object] = [None] * len(self._boards)  # on the board of each rank
        self._since = [math.inf] * len(self._boards)  # when that was seen first
        self._judged: set[tuple[int, object]] = set()  # the ranks that were judged last
        self._next = self._earliest = -math.inf  # when they, and when others, may be judged
        self._again = AGAIN

    def look(
        self, now: float, returned: Collection[int], left_threads: Collection[int]
    ) -> DeadlockError | MismatchError | None:
        """Return why the run cannot end; None if it may. now: seconds.

        returned: the ranks that have returned; left_threads: those of them that have left a thread
        of the worker running, which may send.
        """
        heads = [board.head() for board in self._boards]
        for number, head in enumerate(heads):
            seen = head.moves, number in returned
            if seen != self._seen[number]:
                self._seen[number], self._since[number] = seen, now
        if any(head.run != self._run for head in heads):
            return None  # a rank has not begun
        quiet = self._quiet(now, heads, returned)
        if all(heads[number].waiting < 0 for number in quiet) or not self._is_due(now, quiet):
            return None
        began = time.monotonic()
        error = self._judge(now, heads, quiet, returned, left_threads)
        self._earliest = now + (time.monotonic() - began) / SHARE
        return error

    def _quiet(self, now: float, heads: list[Head], returned: Collection[int]) -> list[int]:
        """Return all ranks if none of them moves, else those that wait or have returned.

        While others move, ranks must be quiet for longer: those that come to wait with them at
        nearly the same time belong into the same verdict.
        """
        if now - max(self._since) >= QUIET:
            return list(range(len(heads)))
        return [
            number
            for number, since in enumerate(self._since)
            if now - since >= QUIET_RANK and (heads[number].waiting >= 0 or number in returned)
        ]

    def _is_due(self, now: float, quiet: list[int]) -> bool:
        """Return whether these ranks are to be judged now: not all of them were, or it is time."""
        if now < self._earliest and len(quiet) < len(self._boards):
            return False
        judged = {(number, self._seen[number]) for number in quiet}
        if not judged <= self._judged:
            self._again = AGAIN
        elif now < self._next:
            return False
        self._judged = judged
        # A thread that keeps the run from being judged may end; asking costs room on the board.
        self._next, self._again = now + self._again, 2 * self._again
        return True

    def _judge(
        self,
        now: float,
        heads: list[Head],
        quiet: Collection[int],
        returned: Collection[int],
        left_threads: Collection[int],
    ) -> DeadlockError | MismatchError | None:
        # Of a rank that moves only the counts matter: it may do anything, so it is running.
        boards = self._boards
        copies = [b.read() if n in quiet else b.read_counts() for n, b in enumerate(boards)]
        if any(boards[number].head() != heads[number] for number in quiet):
            return None  # the copies are of different moments
        snapshots = [Snapshot(number, copy) for number, copy in enumerate(copies)]
        gone = [number for number in returned if number in quiet]
        error = judge(snapshots, gone, long=now - max(self._since) >= AGAIN)
        if error is None:
            return None
        waiting = {snapshot.rank for snapshot in snapshots if snapshot.waiting}
        here = range(len(self._ranks))
        asked = [self._ranks[number] for number in here if number in waiting.union(left_threads)]
        found = ask_for_stacks(asked)
        if self._others is not None:
            # Boards of other hosts arrive late. At the moment at which all hosts are asked, none
            # of these ranks may have moved.
            far = self._others.ask_for_stacks(sorted(waiting.difference(here)))
            if far is None or any(boards[number].head() != heads[number] for number in quiet):
                self._seen = [None] * len(boards)  # look again soon
                return None
            found += far
        return None if any(map(_may_go_on, found)) else error


def _may_go_on(stacks: list[list[Frame]]) -> bool:
    """Return whether another thread of a rank with these stacks may communicate."""
    return not stacks or any(map(_may_communicate, stacks[1:]))


def _may_communicate(stack: list[Frame]) -> bool:
    """Return whether a thread may run the worker's code, or call what the worker has passed on.

    A thread that only the standard library has on its stack may do so next, as a Timer or a thread
    pool does. A package's own thread, which watches something, does not.
    """
    if any(frame.own or frame.file.endswith(_COLLECTIVES) for frame in stack):
        return True
    if not stack or not all(in_standard_library(frame.file) for frame in stack):
        return False
    places = [(os.path.basename(frame.file), frame.function) for frame in stack]
    if any(place in _HELPERS for place in places):
        return False
    waits = itertools.dropwhile(("threading.py", "wait").__eq__, places)
    return next(waits, None) not in _IDLE


_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
# File and function of threads of the standard library that only move data for others, and of those
# that wait for work, which the rank's stuck main thread cannot give them.
_HELPERS = {
    ("queues.py", "_feed"),
    *(("pool.py", name) for name in ("_handle_workers", "_handle_tasks", "_handle_results")),
}
_IDLE = {("thread.py", "_worker"), ("pool.py", "worker"), ("queue.py", "get")}
