"""When a run is judged: how long nothing must have moved, and how often to look again."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ddp_kit.error_text import Frame
from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.pool.rank_handle import RankHandle, ask_for_stacks
from ddp_kit.trace import Snapshot
from ddp_kit.trace.stacks import in_standard_library
from ddp_kit.verdict import judge

QUIET = 0.5  # seconds in which nothing moves before a run is judged
AGAIN = 5.0  # seconds until it is judged again, then twice as many, and so on


class Others(Protocol):
    """The ranks of other hosts; see `pool.other_hosts`."""

    boards: Sequence[Any]  # one for each rank, with the methods of Board that only read

    def ask_for_stacks(self, ranks: Sequence[int]) -> list[list[list[Frame]]] | None:
        """Return which lines ranks run; None if one has moved or does not answer."""


class DeadlockWatch:
    """Watches the boards of a run's ranks, and has them judged when nothing moves on them.

    ranks: those of this host. others: those of other hosts, whose numbers follow.
    """

    def __init__(self, ranks: Sequence[RankHandle], run: int, others: Others | None = None) -> None:
        self._ranks, self._others = ranks, others
        self._boards = [*(rank.board for rank in ranks), *(others.boards if others else ())]
        self._run = run
        self._seen: object = None
        self._since = math.inf
        self._again = AGAIN

    def look(
        self, now: float, returned: Collection[int], left_threads: Collection[int]
    ) -> DeadlockError | MismatchError | None:
        """Return why the run cannot end; None if it may. now: seconds.

        returned: the ranks that have returned; left_threads: those of them that have left a thread
        of the worker running, which may send.
        """
        heads = [board.head() for board in self._boards]
        seen = [head.moves for head in heads], len(returned)
        if seen != self._seen:
            self._seen, self._since, self._again = seen, now, AGAIN
            return None
        if now - self._since < QUIET:
            return None
        # A thread that keeps the run from being judged may end; asking costs room on the board.
        self._since, self._again = now + self._again - QUIET, 2 * self._again
        if all(head.waiting < 0 for head in heads):
            return None
        snapshots = [Snapshot(number, board.read()) for number, board in enumerate(self._boards)]
        if any(snapshot.log.head.run != self._run for snapshot in snapshots):
            return None  # a rank has not begun
        error = judge(snapshots, returned)
        if error is None:
            return None
        waiting = {snapshot.rank for snapshot in snapshots if snapshot.waiting}
        here = range(len(self._ranks))
        asked = [self._ranks[number] for number in here if number in waiting.union(left_threads)]
        found = ask_for_stacks(asked)
        if self._others is not None:
            # Boards of other hosts arrive late. At the moment at which all hosts are asked, none
            # of these ranks may have moved. One that has returned may have left a thread.
            far = self._others.ask_for_stacks(sorted(waiting.union(returned).difference(here)))
            if far is None or heads != [board.head() for board in self._boards]:
                self._seen = None  # look again soon
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
