"""When a run is judged: how long nothing must have moved, and how often to look again."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from ddp_kit import settings
from ddp_kit.backends import engine
from ddp_kit.error_text import Frame, name_ranks
from ddp_kit.pool.other_hosts import OtherHosts
from ddp_kit.pool.ranks import RankHandle, ask_for_stacks, started_by
from ddp_kit.pool.wire.messages import Raised
from ddp_kit.trace import Snapshot
from ddp_kit.trace.board import Head
from ddp_kit.trace.polling import find_polling_loop
from ddp_kit.trace.rank import recorder
from ddp_kit.trace.stacks import in_standard_library
from ddp_kit.verdict import Verdict, ends_by_its_limit, judge

# Seconds until they are judged again, then twice as many, and so on. A small message between two
# ranks that are both there takes milliseconds, so after this time it is lost.
AGAIN = 1.2
SHARE = 0.05  # of the time, at most, is spent on judging a run in which something moves
KEY_NOTICED = 0.3  # seconds in which a rank notices that a key was set, after it has answered


class DeadlockWatch:
    """Watches the boards of a run's ranks, and judges the ranks on whose boards nothing moves.

    ranks: those of this host. remote: those of other hosts, whose numbers follow.
    """

    def __init__(
        self, ranks: Sequence[RankHandle], run: int, remote: OtherHosts | None = None
    ) -> None:
        self._ranks, self._remote, self._run = ranks, remote, run
        self._boards = [*(rank.board for rank in ranks), *(remote.boards if remote else ())]
        self._seen: list[object] = [None] * len(self._boards)  # on the board of each rank
        self._since = [math.inf] * len(self._boards)  # when that was seen first
        self._judged: set[tuple[int, object]] = set()  # the ranks that were judged last
        self._next = self._earliest = -math.inf  # when they, and when others, may be judged
        self._again = AGAIN
        self.notices: list[str] = []  # to be shown at once
        # Why waits can end only by their own time limit, by rank and event.
        self._limited: dict[tuple[int, int], Verdict] = {}
        self._said: set[str] = set()
        self._is_held = False  # which was said
        # What the current look is about: the moment, and the ranks that do not move.
        self._now, self._heads, self._quiet = -math.inf, list[Head](), list[int]()

    def look(
        self, now: float, returned: Collection[int], left_threads: Collection[int]
    ) -> Verdict | None:
        """Return why the run cannot end; None if it may. now: seconds.

        returned: the ranks that have returned; left_threads: those of them that have left a thread
        of the worker running, which may send.
        """
        self._now, self._heads = now, [board.head() for board in self._boards]
        for number, head in enumerate(self._heads):
            seen = head.moves, number in returned
            if seen != self._seen[number]:
                self._seen[number], self._since[number] = seen, now
        if any(head.run != self._run for head in self._heads):
            return None  # a rank has not begun
        self._quiet = self._find_quiet(returned)
        # If nothing has moved for so long, threads may wait instead of the workers.
        rest = self._now - max(self._since) >= settings.NO_VERDICT_SAID_AFTER
        if not rest and not any(self._heads[number].waits for number in self._quiet):
            return None
        if not self._is_due():
            return None
        began = time.monotonic()
        verdict = self._judge(returned, left_threads)
        self._earliest = now + (time.monotonic() - began) / SHARE
        return verdict

    def _find_quiet(self, returned: Collection[int]) -> list[int]:
        """Return all ranks if none of them moves, else those that wait or have returned.

        While others move, ranks must be quiet for longer: those that come to wait with them at
        nearly the same time belong in the same verdict.
        """
        everyone = range(len(self._heads))
        if self._now - max(self._since) >= settings.RUN_JUDGED_AFTER:
            return list(everyone)
        rests = [number for number in everyone if self._heads[number].waits or number in returned]
        least = settings.RANKS_JUDGED_AFTER
        return [number for number in rests if self._now - self._since[number] >= least]

    def _is_due(self) -> bool:
        """Return whether the quiet ranks are to be judged: not all of them were, or it is time."""
        if self._now < self._earliest and len(self._quiet) < len(self._boards):
            return False
        judged = {(number, self._seen[number]) for number in self._quiet}
        if not judged <= self._judged:
            self._again = AGAIN
        elif self._now < self._next:
            return False
        self._judged = judged
        # A thread that keeps the run from being judged may end; asking costs room on the board.
        self._next, self._again = self._now + self._again, 2 * self._again
        return True

    @property
    def _has_moved(self) -> bool:
        return any(self._boards[number].head() != self._heads[number] for number in self._quiet)

    def _judge(self, returned: Collection[int], left_threads: Collection[int]) -> Verdict | None:
        # Of a rank that moves only the counts matter: it may do anything, so it is running.
        copies = [
            board.read() if number in self._quiet else board.read_counts()
            for number, board in enumerate(self._boards)
        ]
        if self._has_moved:
            return None  # the copies are of different moments
        snapshots = [Snapshot(number, copy) for number, copy in enumerate(copies)]
        gone = [number for number in returned if number in self._quiet]
        # Of another host it is not known whether a rank that has returned has left a thread.
        left = {*left_threads, *(number for number in gone if number >= len(self._ranks))}
        verdict = judge(snapshots, gone, long=self._now - max(self._since) >= AGAIN)
        if verdict is not None:
            return self._confirm(verdict, snapshots, left)
        if (why := ends_by_its_limit(snapshots, gone)) is not None:
            self._note_limited(why, snapshots, left)
        self._note_resting(snapshots, gone)
        if crowded := [snapshot.rank for snapshot in snapshots if snapshot.is_crowded]:
            self._note_held(self._quiet, _CROWDED.format(name_ranks(crowded), settings.EVENTS_KEPT))
        return None

    def _note_limited(
        self, why: Verdict, snapshots: Sequence[Snapshot], left_threads: Collection[int]
    ) -> None:
        """Note waits that only their own time limit can end; a rank may go on after that."""
        stuck = [snapshots[wait.rank] for wait in why.waits]
        waits = {(each.rank, each.waits[0].index) for each in stuck if not each.waits_forever}
        known = waits <= self._limited.keys()
        confirmed = None if known else self._confirm(why, snapshots, left_threads)
        if confirmed is None:
            return
        self._limited |= dict.fromkeys(waits, confirmed)
        if why.fact not in self._said:  # it may try again and again
            self._said.add(why.fact)
            self.notices.append(why.fact)

    def _note_resting(self, snapshots: Sequence[Snapshot], returned: Collection[int]) -> None:
        """Note workers that sleep or wait unseen, but for which their threads were stuck."""
        unseen = [
            each.rank
            for each in snapshots
            if each.thread_waits and not each.waits and each.rank not in returned
        ]
        stacks = (unseen and self._ask_for_stacks(unseen)) or {}
        resting = {rank: found[0] for rank, found in stacks.items() if found and _rests(found[0])}
        if resting:
            rest = [each.joining() if each.rank in resting else each for each in snapshots]
            if judge(rest, returned) is not None:
                self._note_held(resting, _name_thread(resting, snapshots, "MainThread"))

    def why_raised(
        self, snapshots: Sequence[Snapshot], raised: Mapping[int, Raised]
    ) -> Verdict | None:
        """Return why ranks raised, if a wait did whose end was certain to be its time limit.

        raised: what they have reported, by rank.
        """
        for rank, reply in sorted(raised.items()) if self._limited else ():
            wait, last = reply.inside, snapshots[rank].last_wait
            verdict = self._limited.get((rank, last.index)) if last else None
            if last and verdict and wait and (wait.op, wait.where) == (last.call, last.where):
                return verdict
        return None

    def _confirm(
        self,
        verdict: Verdict,
        snapshots: Sequence[Snapshot],
        left_threads: Collection[int],
    ) -> Verdict | None:
        """Return the verdict if nothing but the ranks' waits decides how they go on."""
        waits = {snapshot.rank: snapshot.waits for snapshot in snapshots if snapshot.waits}
        if verdict.waits:  # what other ranks do cannot help these
            waits = {wait.rank: waits[wait.rank] for wait in verdict.waits}
        keys = any(event.kind == "key" for events in waits.values() for event in events)
        asked = range(len(snapshots)) if keys else sorted(waits.keys() | set(left_threads))
        stacks = self._ask_for_stacks(asked)
        if stacks is None:
            self._seen = [None] * len(self._boards)  # look again soon
            return None
        acting: dict[int, list[Frame]] = {}
        for number in asked:
            snapshot, found = snapshots[number], stacks[number]
            known = len(snapshot.thread_waits) if number in waits else 0
            if not found:
                self._note_held(waits, _SILENT.format(number))
                return None
            if snapshot.polls and not _polls(found[0]):
                return None
            for stack in _may_act(found, known, snapshot.joins, snapshot.has_tasks):
                acting.setdefault(number, stack)
        if acting:
            self._note_held(waits, _name_thread(acting, snapshots))
            return None
        if keys and not self._keys_stay_unset(snapshots):
            return None
        return _located(verdict, stacks) if verdict.waits else verdict

    def _ask_for_stacks(self, numbers: Sequence[int]) -> dict[int, list[list[Frame]]] | None:
        """Return which lines ranks run; None if one has moved on another host."""
        here = [number for number in numbers if number < len(self._ranks)]
        answers = ask_for_stacks([self._ranks[number] for number in here])
        if self._remote is not None:
            # Boards of other hosts arrive late. At the moment at which all hosts are asked, none
            # of these ranks may have moved.
            far = self._remote.ask_for_stacks(numbers[len(here) :])
            if far is None:
                return None
            answers += far
        return None if self._has_moved else dict(zip(numbers, answers, strict=True))

    def _note_held(self, ranks: Iterable[int], why: str) -> None:
        """Note, once in a run, what keeps ranks from being judged that have not moved for long."""
        since = max(self._since[number] for number in ranks)
        if self._now - since < settings.NO_VERDICT_SAID_AFTER:
            self._next = min(self._next, since + settings.NO_VERDICT_SAID_AFTER)
        elif not self._is_held:
            self._is_held = True
            self.notices.append(why)

    def _keys_stay_unset(self, snapshots: Sequence[Snapshot]) -> bool:
        """Return whether nobody sets the keys that ranks wait for, or has just set them."""
        if _have_processes(self._ranks):
            return False  # they may have the store, too
        # All ranks have answered. Whoever waits for a key that was set would move by now.
        time.sleep(KEY_NOTICED)
        return all(self._boards[each.rank].head() == each.board.head for each in snapshots)


def _have_processes(ranks: Sequence[RankHandle]) -> bool:
    own = {rank.process.pid for rank in ranks}
    for process in started_by(ranks):
        with suppress(psutil.Error):  # one that has ended may wait to be reaped
            if process.pid not in own and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _may_act(
    stacks: list[list[Frame]], waits: int = 0, joins: bool = False, has_tasks: bool = False
) -> list[list[Frame]]:
    """Return the stacks of those other threads of a rank that may communicate.

    waits: how many of them wait for operations that were judged. joins: the worker's own thread
    waits until threads go on, so it counts whatever another one does. has_tasks: tasks in pools
    have callbacks.
    """
    places = [[(frame.file, frame.function) for frame in stack] for stack in stacks]
    rest = [stack for stack, at in zip(stacks[1:], places[1:], strict=True) if _WAIT not in at]
    if len(stacks) - 1 - len(rest) != waits:
        rest = stacks[1:]
    passes = joins or has_tasks
    return [s for s in rest if _may_communicate(s, passes) or (joins and not _is_idle(s, passes))]


def _may_communicate(stack: list[Frame], passes: bool) -> bool:
    """Return whether a thread may run the worker's code, or call what the worker has passed on.

    A thread that only the standard library has on its stack may do so next, as a Timer or a thread
    pool does. A package's own thread, which watches something, does not.
    """
    if any(frame.own or frame.file.endswith(_COLLECTIVES) for frame in stack):
        return True
    stack = [frame for frame in stack if not frame.file.startswith(_RECORDER)]
    if not stack or not all(in_standard_library(frame.file) for frame in stack):
        return False
    return not _is_idle(stack, passes)


def _is_idle(stack: list[Frame], passes: bool) -> bool:
    """Return whether a thread only helps others, or waits for work; or it belongs to the kit.

    passes: somebody waits for the result of a task, or is called with it.
    """
    if any(f.file == _WATCHES_PARENT or (f.file, f.function) == _OF_GROUP for f in stack):
        return True
    roles = [_ROLES.get((os.path.basename(frame.file), frame.function)) for frame in stack]
    if PASSES_ON in roles:
        return not passes
    if HELPS in roles:
        return True
    for role, frame in zip(roles, stack, strict=True):
        if role != WAITS:  # the line tells a wait for work from a call of C, which has no frame
            return role == IDLES and any(text in frame.source for text in _GETS)
    return False


def _name_thread(
    acting: Mapping[int, list[Frame]], snapshots: Sequence[Snapshot], unknown: str = ""
) -> str:
    """Return a line on a thread that may act.

    acting: the stack of one such thread of each rank. unknown: the name of one that is on no board.
    """
    found: dict[tuple[str, Frame], list[int]] = {}
    for rank, stack in acting.items():
        name, started = snapshots[rank].threads.get(getattr(stack, "thread", 0), (unknown, None))
        frame = _own_line(stack) or started or stack[0]
        found.setdefault((name or frame.function, frame), []).append(rank)
    (name, frame), ranks = next(iter(found.items()))
    return f"{_HELD_BY}: {name!r} of {name_ranks(ranks)}, {frame}"


def _located(verdict: Verdict, stacks: dict[int, list[list[Frame]]]) -> Verdict:
    """Return the verdict with the line of the worker where a thread has no line of its own."""
    waits = (
        wait if wait.where else replace(wait, where=_own_line(stacks[wait.rank][0]))
        for wait in verdict.waits
    )
    return replace(verdict, waits=tuple(waits))


def _own_line(stack: list[Frame]) -> Frame | None:
    return next((frame for frame in stack if frame.own), None)


def _rests(stack: list[Frame]) -> bool:
    """Return whether a thread is in a wait of the standard library, or sleeps."""
    return in_standard_library(stack[0].file) or "sleep(" in stack[0].source


def _polls(stack: list[Frame]) -> bool:
    """Return whether a thread is in a loop that ends only when an operation is complete."""
    own = _own_line(stack)
    return own is not None and find_polling_loop(own.file, own.line) is not None


_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_RECORDER = os.path.join(os.path.dirname(recorder.__file__), "")
_WAIT = recorder.__file__, recorder.Recorder.block.__name__  # in which every recorded wait is
# In a thread of a process group in Python, which moves operations that are on the boards.
_OF_GROUP = engine.__file__, engine.Engine._move_alone.__name__
_WATCHES_PARENT = os.path.join(os.path.dirname(__file__), "rank", "bootstrap.py")
_HELD_BY = "no verdict while this thread may still act"
_SILENT = (
    "no verdict while rank {} does not say what it does: native code may hold Python's lock, or "
    "the worker handles all signals, also the real-time signal that the kit uses"
)
_CROWDED = "no verdict on {}: more than {:,} calls are open, or as many tags were used"

# What a thread does that runs nothing but the standard library, by the files and functions on its
# stack. It is a guess, because a rank that is stuck cannot be asked; tests/test_deadlocks.py
# compares the names with the threads of the Python that runs it.
HELPS = "only moves data for other threads"
PASSES_ON = "passes on the results of other processes"
WAITS = "waits for the function that called this"
IDLES = "waits for work, which the rank's stuck main thread cannot give it"
_ROLES = {
    ("queues.py", "_feed"): HELPS,
    ("resource_sharer.py", "_serve"): HELPS,
    ("pool.py", "_handle_workers"): HELPS,
    ("pool.py", "_handle_tasks"): HELPS,
    ("pool.py", "_handle_results"): PASSES_ON,
    ("process.py", "wait_result_broken_or_wakeup"): PASSES_ON,
    ("threading.py", "wait"): WAITS,
    ("thread.py", "_worker"): IDLES,
    ("pool.py", "worker"): IDLES,
    ("queue.py", "get"): IDLES,
}
_GETS = ("get(", ".wait(")  # in the line of a thread that waits for work
