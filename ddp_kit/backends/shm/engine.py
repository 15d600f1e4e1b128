"""The operations of a rank in a group, and the threads that move them on.

Each is a generator, which does what it can and then yields the ranks that it needs. Collectives run
one after another, in the order in which they were started. Messages to one rank are written in that
order, too.

`advance` moves everything as far as it goes, without waiting. A thread in `wait` calls it, sleeps
until the bell of a rank that it needs has changed, and calls it again. A thread of the group does
the same for operations that no other thread waits for.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from ddp_kit.backends.process_group import Call, PythonWork, call_back, timeout_error
from ddp_kit.backends.shm import segment as segments
from ddp_kit.backends.shm.segment import Segment

# The ranks that must act before an operation can go on: all of a tuple, or any one of a set.
Needs = tuple[int, ...] | frozenset[int]
Steps = Iterator[Needs]

# Seconds to look at a bell before sleeping, if every rank has a core. With a twentieth of it, the
# slowest tenth of the all_reduces of 1 MB took twice as long, because waking a thread takes time.
_SPIN = 0.001
_SLICE = 0.07  # seconds of a sleep, after which the processes and the time limits are checked
_PATIENCE = 0.0005  # seconds that the thread leaves to a caller who may be about to wait


class SharedWork(PythonWork):
    """One operation on shared memory. steps: what is left of it."""

    def __init__(self, engine: Engine, call: Call, is_collective: bool = False) -> None:
        super().__init__(call.name, call.outputs)
        self._engine = engine
        self.is_collective = is_collective
        self.is_async = call.is_async
        self.timeout = call.timeout
        self.deadline = time.monotonic() + call.timeout
        self.steps: Steps = iter(())
        self.needs: Needs = ()
        self.waiting = 0  # threads

    def is_completed(self) -> bool:
        """Return whether it is done. The group's thread moves it on, so a signal cannot end it."""
        if self.done:
            self.complete_future()
        else:
            time.sleep(0)  # lets that thread have the GIL
        return self.done

    def _wait(self, seconds: float | None) -> None:
        try:
            if not self.done:
                self._engine.wait(self, seconds)
        finally:
            if self.done:
                self.complete_future()


class Engine:
    """The operations of this process in one group.

    members: pidfds of the other processes, by rank.
    """

    def __init__(self, segment: Segment, members: dict[int, int]) -> None:
        self.segment = segment
        self.failure: Exception | None = None  # after it, the ranks are no longer in step
        self.closed = False
        self._lock = threading.Lock()
        self._collectives: deque[SharedWork] = deque()
        self._messages: list[SharedWork] = []
        self._unfinished: dict[SharedWork, None] = {}
        self._ended: list[SharedWork] = []  # whose futures are to be completed
        self._seen: list[int] = []  # of each bell, before the last look at what it announces
        self._members = members
        self._poll = select.poll()
        for descriptor in members.values():
            self._poll.register(descriptor, select.POLLIN)
        self._looked = 0.0  # when the processes of the others were last looked at
        self._spins = segment.size <= len(os.sched_getaffinity(0))
        self._left_alone: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: SharedWork, steps: Steps) -> SharedWork:
        """Begin an operation, which the caller may wait for at once, or never."""
        work.steps = steps
        with self._lock:
            self._check(work.name)
            self._unfinished[work] = None
            (self._collectives if work.is_collective else self._messages).append(work)
        self.advance()
        if not work.done and work.is_async:
            self._leave_alone(0.0 if work.is_collective else _PATIENCE)
        return work

    def _check(self, name: str) -> None:
        if self.closed:
            raise RuntimeError(f"{name}: this process group was destroyed")
        if self.failure is not None:
            raise RuntimeError(
                f"{name}: an earlier operation of this process group failed ({self.failure}); "
                "destroy the group, and create a new one"
            )

    def advance(self) -> None:
        """Do all that can be done without waiting."""
        with self._lock:
            if not self.closed:
                self._advance()
            ended, self._ended = self._ended, []
        # A thread that waits for one completes its future itself.
        call_back([each for each in ended if each.has_future and not each.waiting])

    def _advance(self) -> None:
        bells, own = self.segment.bells, self.segment.rank
        while True:
            self._seen = bells.tolist()
            while self._collectives and self._step(self._collectives[0]):
                if self._collectives:  # a failure clears it
                    self._collectives.popleft()
            if self._messages:
                self._messages = [message for message in self._messages if not self._step(message)]
            if bells[own] == self._seen[own]:
                return

    def _step(self, work: SharedWork) -> bool:
        """Move an operation on; return whether it is over."""
        try:
            work.needs = next(work.steps)
            return False
        except StopIteration:
            self._end(work)
        except (RuntimeError, ValueError) as error:
            self._fail(work, error)
        except BaseException:  # raised by a signal handler
            self._fail(work, RuntimeError(f"{work.name} was interrupted"))
            raise
        return True

    def _end(self, work: SharedWork, error: Exception | None = None) -> None:
        """Mark an operation as done; it may have been given up before."""
        if not work.done:
            work.error, work.done = error, True
            self._ended.append(work)
        self._unfinished.pop(work, None)

    def _fail(self, work: SharedWork, error: Exception) -> None:
        """End an operation that has failed; after a collective, no other one can follow."""
        self._end(work, error)
        if work in self._collectives:
            self.failure = error
            for other in self._collectives:
                self._end(other, error)
            self._collectives.clear()

    def _give_up(self, work: SharedWork, error: Exception) -> None:
        """Fail an operation from outside, unless it has ended meanwhile."""
        with self._lock:
            if not work.done:
                self._fail(work, error)
        self.advance()

    # Waiting

    def wait(self, work: SharedWork, timeout: float | None) -> None:
        """Wait until an operation is done. Raises RuntimeError after `timeout` seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        work.waiting += 1
        try:
            while True:
                self.advance()
                if work.done:
                    return
                now = time.monotonic()
                self._enforce(work, now)
                if work.done:
                    return
                if limit is not None and now > limit:
                    raise timeout_error(work.name, timeout or 0.0)
                ends = work.deadline if limit is None else min(limit, work.deadline)
                self._sleep([work], min(_SLICE, max(0.0, ends - now)), self._spins)
        finally:
            work.waiting -= 1
            if not work.done and self._thread is not None:
                self._left_alone.put(0.0)

    def _sleep(self, operations: Sequence[SharedWork], seconds: float, spins: bool) -> None:
        """Sleep until what the operations need has changed. spins: look at the bell first."""
        with self._lock:
            if self.closed or any(work.done for work in operations):
                return
            watched: set[int] = set()
            for work in operations:
                needs = self._needs(work)
                watched.update(needs[:1] if isinstance(needs, tuple) else needs)
            seen = self._seen
        bells, addresses = self.segment.bells, self.segment.addresses
        if spins and len(watched) == 1:
            (rank,) = watched
            last, ends = seen[rank], time.perf_counter() + _SPIN
            while time.perf_counter() < ends:
                for _ in range(16):
                    if bells[rank] != last:
                        return
                time.sleep(0)  # lets another thread have the GIL
        segments.sleep_for_any([(addresses[rank], seen[rank]) for rank in watched], seconds)

    def _needs(self, work: SharedWork) -> Needs:
        """Return the ranks that an operation waits for; collectives wait for the first of them."""
        return (self._collectives[0] if work in self._collectives else work).needs

    def _enforce(self, work: SharedWork, now: float) -> None:
        """Fail an operation after its timeout, or if it needs a process that has ended."""
        if now > work.deadline:
            self._give_up(work, timeout_error(work.name, work.timeout))
            return
        if now < self._looked + _SLICE / 2:
            return
        self._looked = now
        with self._lock:  # poll is for one thread at a time
            gone = {descriptor for descriptor, _ in self._poll.poll(0)} if self._members else ()
        if not gone:
            return
        dead = {rank for rank, descriptor in self._members.items() if descriptor in gone}
        self.advance()  # for the last things that they have written
        with self._lock:
            needs = self._needs(work) if not work.done else ()
        missing = [rank for rank in needs if rank in dead]
        others = set(needs) - {self.segment.rank}
        if missing and (work.is_collective or len(missing) == len(others)):
            error = f"{work.name} failed: the process of rank {missing[0]} has ended"
            self._give_up(work, RuntimeError(error))

    # The thread

    def _leave_alone(self, patience: float) -> None:
        if self._thread is None:
            name, target = "ddp_kit shm", self._move_alone
            self._thread = threading.Thread(target=target, name=name, daemon=True)
            self._thread.start()
        self._left_alone.put(patience)

    def _move_alone(self) -> None:
        """Move what no thread waits for, until None comes. It runs in a thread of the group."""
        while (patience := self._left_alone.get()) is not None:
            if patience:
                time.sleep(patience)
            spins = False
            while alone := [each for each in list(self._unfinished) if not each.waiting]:
                self.advance()
                now = time.monotonic()
                for work in alone:
                    if not work.done:
                        self._enforce(work, now)
                alone = [each for each in alone if not each.done]
                if alone:
                    self._sleep(alone, _SLICE, spins)
                    spins = self._spins

    def close(self) -> None:
        """End what is unfinished, and the thread. A second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            error = RuntimeError("this process group was destroyed")
            for work in list(self._unfinished):
                self._end(work, error)
            self._collectives.clear()
            ended, self._ended = self._ended, []
        for work in ended:
            work.complete_future()
        self._left_alone.put(None)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout=5)
        for descriptor in self._members.values():
            os.close(descriptor)
        self._members = {}
