"""The wait for a run's replies: what each rank has said so far, and what comes of it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from multiprocessing import connection
from typing import Any

from ddp_kit.errors import PoolError, RankDiedError, RankError, RunTimeoutError
from ddp_kit.failures import Wait, tell_returned, tell_waits
from ddp_kit.pool import cells, view
from ddp_kit.pool.messages import Raised, Returned
from ddp_kit.pool.process import RankProcess
from ddp_kit.pool.request import unpack
from ddp_kit.pool.result import Result
from ddp_kit.trace import Trace

START_TIMEOUT = 300.0  # seconds for fresh processes to import torch and form a group
GRACE = 0.3  # seconds after each failure in which ranks that wait may yet report
LONGEST_GRACE = 1.5  # seconds after the first failure when nobody is waited for any more
REFRESH = 0.1  # seconds between two looks at the live view


class Outcome:
    """What the ranks of one run have said so far, and the wait for the rest."""

    def __init__(self, ranks: list[RankProcess], shown: view.View, starting: bool = False) -> None:
        self.ranks = ranks
        self._starting = starting  # the replies are to Form; no worker was called yet
        self._view = shown
        self._timeout = math.inf
        self._looked = time.monotonic()
        self._waiting: set[int] = set()
        self._returned: dict[int, Returned] = {}
        self._raised: dict[int, Raised] = {}
        self._died: dict[int, int | None] = {}
        self._timed_out = False
        self.waits: list[Wait] = []  # where the ranks were that close() has stopped

    @property
    def group_intact(self) -> bool:
        """Every rank returned, and left the process group as it was."""
        return len(self._returned) == len(self.ranks) and all(
            reply.left.group_intact for reply in self._returned.values()
        )

    def told(self) -> list[str]:
        """Say where the ranks were when the run was stopped."""
        if self._starting:
            return ["the ranks were still starting: no worker had begun"]
        return tell_waits(self.waits, cells.cell_names()) + tell_returned(self._returned)

    @property
    def threads(self) -> dict[int, str]:
        """The threads that workers have left running, by rank."""
        replies = self._returned | self._raised
        return {n: reply.left.thread for n, reply in sorted(replies.items()) if reply.left.thread}

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
                self._view.update([rank.newest_line() for rank in self.ranks])
            if len(self._raised) + len(self._died) > bad:  # each report may bring others
                bad = len(self._raised) + len(self._died)
                first_bad, newest_bad = min(first_bad, now), now
            elif not bad and now >= deadline:
                self._timed_out = True
                return False
            if now >= first_bad + LONGEST_GRACE or (now >= newest_bad + GRACE and self._all_wait()):
                break
        return not bad

    def _all_wait(self) -> bool:
        """Whether no rank is left that might yet report, or come to where it will wait."""
        return all(self.ranks[number].board.read(number).op for number in self._waiting)

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

    def close(self) -> list[str]:
        """Stop the ranks that still owe a reply, and return what each rank has printed."""
        stuck = {number for number, rank in enumerate(self.ranks) if rank.owed}
        # All are asked before one is stopped: its end would free others from their wait.
        asked = [] if self._starting else sorted(stuck - self._died.keys())
        self.waits = [self.ranks[number].board.read(number) for number in asked]
        for number, rank in enumerate(self.ranks):
            rank.drain_output()
            if number in stuck or number in self.threads:
                rank.stop()
        self._view.close()
        return [rank.take_output() for rank in self.ranks]

    def result(self, output: list[str]) -> Result:
        """Return what the ranks returned, or raise what kept them from it."""
        if self._died:  # what came out of a wait then is a lost connection
            rank = min(self._died)
            lost = [replace(r.inside, rank=n) for n, r in self._raised.items() if r.inside]
            others = set(self._died) - {rank}
            failures = {n: r.failure for n, r in self._raised.items() if not r.inside}
            exitcode, waits = self._died[rank], self.waits + lost
            raise RankDiedError(rank, exitcode, others, waits, failures, cells.cell_names())
        if self._raised:
            failures = {number: reply.failure for number, reply in self._raised.items()}
            raise RankError(failures, self.waits, cells.cell_names())
        if self._timed_out and self._starting:
            raise PoolError(f"the ranks were not ready after {START_TIMEOUT:g} s; try again")
        if self._timed_out:
            names = cells.cell_names()
            raise RunTimeoutError(self._timeout, self.waits, self._returned, names)
        sends = [send for _, reply in sorted(self._returned.items()) for send in reply.sends]
        values = (unpack(rank, self._returned[rank].parcel) for rank in range(len(self.ranks)))
        return Result(tuple(values), tuple(output), Trace(len(self.ranks), tuple(sends)))
