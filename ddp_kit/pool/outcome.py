"""The wait for a run's replies: what each rank has said so far, and what comes of it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import takewhile
from multiprocessing import connection
from typing import Any

from ddp_kit.errors import (
    BackendError,
    DeadlockError,
    MismatchError,
    PoolError,
    RankDiedError,
    RankError,
    RunTimeoutError,
)
from ddp_kit.failures import (
    RankFailure,
    TracebackFormatter,
    Wait,
    format_returned,
    format_unawaited,
)
from ddp_kit.pool import cells, view, worker
from ddp_kit.pool.messages import Raised, Returned
from ddp_kit.pool.process import RankProcess, followed, why_not_ready
from ddp_kit.pool.request import unpack
from ddp_kit.pool.result import Result
from ddp_kit.pool.watch import Watch
from ddp_kit.trace import EMPTY, Snapshot, join, read_wait
from ddp_kit.verdict import judge

START_TIMEOUT = 300.0  # seconds for fresh processes to import torch and form a group
GRACE = 0.3  # seconds after each failure in which ranks that wait may yet report
LONGEST_GRACE = 1.5  # seconds after the first failure when nobody is waited for any more
REFRESH = 0.1  # seconds between two looks at the live view
SHORTEST_WAIT = 200_000_000  # nanoseconds after which the live view says that a rank waits


class Outcome:
    """What the ranks of one run have said so far, and the wait for the rest.

    run: the pool's number of it; None: they form their group. watched: look for a deadlock, which
    takes all ranks.
    """

    def __init__(
        self,
        ranks: list[RankProcess],
        shown: view.View,
        run: int | None = None,
        watched: bool = True,
    ) -> None:
        self.ranks = list(ranks)  # the pool may replace some before all is told
        self._run = run  # None: the replies are to Form; no worker was called yet
        self._view = shown
        self._timeout = math.inf
        self._looked = time.monotonic()
        self._waiting: set[int] = set()
        self._returned: dict[int, Returned] = {}
        self._raised: dict[int, Raised] = {}
        self._died: dict[int, int | None] = {}
        self._timed_out = False
        self._watch = Watch(ranks, run) if run is not None and watched else None
        self._verdict: DeadlockError | MismatchError | None = None
        self.waits: list[Wait] = []  # where the ranks were that close() has stopped

    @property
    def group_intact(self) -> bool:
        """Every rank replied, and left the process group as it was."""
        replies = [*self._returned.values(), *self._raised.values()]
        return len(replies) == len(self.ranks) and all(r.left.group_intact for r in replies)

    def told(self) -> list[str]:
        """Say where the ranks were when the run was stopped."""
        if self._run is None:
            return ["the ranks were still starting: no worker had begun"]
        waits = TracebackFormatter(cells.cell_names()).waits(self.waits)
        return waits + format_returned(self._returned)

    @property
    def threads(self) -> dict[int, str]:
        """The threads that workers have left running, by rank."""
        replies = self._returned | self._raised
        return {n: reply.left.thread for n, reply in sorted(replies.items()) if reply.left.thread}

    def format_unawaited(self) -> list[str]:
        """Say what workers that returned have started and never waited for."""
        if len(self._returned) < len(self.ranks):
            return []
        events = (event for snapshot in self._snapshots for event in snapshot.unawaited)
        return format_unawaited({Wait(e.rank, e.call, e.where) for e in events})

    @property
    def from_gpu(self) -> bool:
        """A rank returned a tensor that was on a GPU."""
        return any(reply.parcel.from_gpu for reply in self._returned.values())

    def collect(self, timeout: float | None) -> bool:
        """Wait for every reply that is owed; False if a rank failed or the time is over."""
        self._timeout = math.inf if timeout is None else timeout
        deadline = time.monotonic() + self._timeout
        self._waiting = {number for number, rank in enumerate(self.ranks) if rank.owed}
        first_bad = newest_bad = math.inf
        bad = 0
        while self._waiting:
            self._wait(REFRESH)
            now = time.monotonic()
            if now - self._looked >= REFRESH:
                self._looked = now
                self._view.update([self._line(number) for number in range(len(self.ranks))])
                if not bad and self._cannot_end(now):
                    return False
            if len(self._raised) + len(self._died) > bad:  # each report may bring others
                bad = len(self._raised) + len(self._died)
                first_bad, newest_bad = min(first_bad, now), now
            elif not bad and now >= deadline:
                self._timed_out = True
                return False
            if now >= first_bad + LONGEST_GRACE or (now >= newest_bad + GRACE and self._all_wait()):
                break
        return not bad

    def _line(self, number: int) -> view.RankLine:
        """Say in a line what a rank does at the moment."""
        rank, seconds = self.ranks[number], None
        if number in self._returned:
            doing = "done"
        elif number in self._raised:
            doing = "raised"
        elif number in self._died:
            doing = "ended"
        elif self._run is None or rank.board.head().run != self._run:
            doing = "starting"
        else:
            doing = "computing"
            now = time.monotonic_ns()
            if wait := read_wait(rank.board, self._run, now - SHORTEST_WAIT):
                doing, seconds = f"waiting in {wait[0]}", round((now - wait[1]) / 1e9, 1)
        return view.RankLine(doing, seconds, rank.board.progress(), view.newest_line(rank.newest))

    def _cannot_end(self, now: float) -> bool:
        """Ask the watch, which looks only where nothing moves."""
        if self._watch is not None:
            self._verdict = self._watch.look(now, self._returned, self.threads)
        return self._verdict is not None

    def _all_wait(self) -> bool:
        """Whether no rank is left that might yet report, or come to where it will wait."""
        return all(self._snapshot(number).waiting for number in self._waiting)

    def _snapshot(self, number: int) -> Snapshot:
        """Return what stands on a rank's board; nothing if that is about another run."""
        log = self.ranks[number].board.read()
        return Snapshot(number, log if log.head.run == self._run else EMPTY)

    def _wait(self, seconds: float) -> None:
        handles: dict[Any, tuple[int, str]] = {}
        for number in self._waiting:
            rank = self.ranks[number]
            handles[rank.control] = (number, "reply")
            handles[rank.sentinel] = (number, "end")
            if rank.printing:
                handles[rank.printed] = (number, "output")
        ready = [handles[handle] for handle in connection.wait(list(handles), seconds)]
        # A grandchild may hold the sentinel's other end open; the exit code tells all the same.
        ready += [(n, "end") for n in self._waiting if self.ranks[n].process.exitcode is not None]
        for number, what in ready:
            if what == "output":
                self.ranks[number].read_output()
            elif what == "reply":
                self._take_reply(number)
        for number, what in ready:
            # A rank that replied and then ended has its reply in the pipe still.
            if what == "end" and number in self._waiting and not self.ranks[number].control.poll():
                self._note_death(number)

    def _take_reply(self, number: int) -> None:
        reply = self.ranks[number].receive()
        if reply is None:
            self._note_death(number)
        elif isinstance(reply, Returned):
            self._returned[number] = reply
            self._waiting.discard(number)
        elif isinstance(reply, Raised):
            self._raised[number] = reply
            self._waiting.discard(number)
        elif not self.ranks[number].owed:  # Formed
            self._waiting.discard(number)

    def _note_death(self, number: int) -> None:
        self._died[number] = self.ranks[number].join(1)
        self._waiting.discard(number)

    def _where(self, number: int) -> Wait:
        """Say where a rank is; if it is in no call that the kit knows, ask for its lines."""
        wait = self._snapshots[number].as_wait()
        if wait.op is not None or self._snapshots[number].log is EMPTY:
            return wait
        mine, *_ = self.ranks[number].stacks() or [[]]
        inner = takewhile(lambda frame: frame.file != worker.__file__, mine)
        return replace(wait, stack=tuple(frame for frame in inner if frame.own)[::-1])

    def close(self) -> list[str]:
        """Stop the ranks that still owe a reply, and return what each rank has printed."""
        stuck = {number for number, rank in enumerate(self.ranks) if rank.owed}
        # All are asked before one is stopped: its end would free others from their wait.
        self._snapshots = [self._snapshot(number) for number in range(len(self.ranks))]
        if self._run is not None:
            self.waits = [self._where(n) for n in sorted(stuck - self._died.keys())]
        for rank in self.ranks:  # before one is stopped: the others would write that it is gone
            rank.drain_output()
        for number, rank in enumerate(self.ranks):
            if number in stuck or number in self.threads:
                rank.stop()
        self._view.close()
        return [rank.take_output() for rank in self.ranks]

    def result(self, output: list[str]) -> Result:
        """Return what the ranks returned, or raise what kept them from it."""
        failure = self._failure()
        if self._run is None:
            assert failure is not None, "asked only after a failure to start"
            raise failure
        trace = join(self._snapshots)
        error = self._verdict or judge(self._snapshots, self._returned, over=True) or failure
        if isinstance(error, MismatchError):  # what ranks raised comes of it
            error.failures = self._own_failures()
        result = None
        if failure is None and self._verdict is None:
            values = (unpack(rank, self._returned[rank].parcel) for rank in range(len(self.ranks)))
            result = Result(tuple(values), tuple(output), trace)
        if error is None:
            assert result is not None, "no rank has failed"
            return result
        error.trace, error.cell_names = trace, cells.cell_names()
        if isinstance(error, MismatchError):
            error.result = result
        raise error

    def _own_failures(self) -> dict[int, RankFailure]:
        """Return what ranks raised, but not that they lost the connection to one that died."""
        raised = self._raised.items()
        return {n: reply.failure for n, reply in raised if not (self._died and reply.inside)}

    def _failure(self) -> Any:
        """Return the error that tells which ranks died or raised, or were too slow."""
        names = cells.cell_names() if self._died or self._raised or self._timed_out else {}
        if self._died and self._run is None and (why := why_not_ready(self.ranks[0].process)):
            return BackendError(f"the ranks ended before they were ready: {why}")
        if self._died:
            rank = min(self._died, key=lambda n: (followed(self.ranks[n].process), n))
            lost = [replace(r.inside, rank=n) for n, r in self._raised.items() if r.inside]
            others = set(self._died) - {rank}
            died = rank, self._died[rank], others
            return RankDiedError(*died, self.waits + lost, self._own_failures(), names)
        if self._raised:
            return RankError(self._own_failures(), self.waits, names)
        if self._timed_out and self._run is None:
            return PoolError(f"the ranks were not ready after {START_TIMEOUT:g} s; try again")
        if self._timed_out:
            return RunTimeoutError(self._timeout, self.waits, self._returned, names)
        return None
