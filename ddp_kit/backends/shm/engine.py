"""The operations of a rank in a group, and the threads that move them on.

Collectives run one after another, in the order in which they were started. Messages to one rank are
written in that order, too. Receives wait in `messages`.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddp_kit.backends.shm import futex
from ddp_kit.backends.shm.segment import Segment
from ddp_kit.backends.work import Operation, call_back, timeout_error

# The ranks that must act before an operation can go on: all of a tuple, or any one of a set.
Needs = tuple[int, ...] | frozenset[int]
Steps = Iterator[Needs]

# Seconds to look at a bell before sleeping, if every rank has a core. With a twentieth of it, the
# slowest tenth of the all_reduces of 1 MB took twice as long, because waking a thread takes time.
_SPIN = 0.001
_SLICE = 0.07  # seconds of a sleep, after which the processes and the time limits are checked
_PATIENCE = 0.0005  # seconds that the thread leaves to a caller who may be about to wait


class SharedOperation(Operation):
    """One operation on shared memory.

    steps: a generator, which does what it can and then yields what it needs. timeout: seconds from
    now.
    """

    def __init__(
        self, engine: Engine, name: str, steps: Steps, timeout: float, outputs: Sequence = ()
    ) -> None:
        super().__init__(name, outputs)
        self._engine = engine
        self.steps = steps
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.needs: Needs = ()
        self.waiting = 0  # threads

    def poll(self) -> bool:
        """Return whether it is done. The group's thread moves it on, so a signal cannot end it."""
        if self.done:
            self.complete_future()
        else:
            time.sleep(0)  # lets that thread have the GIL
        return self.done

    def wait(self, timeout: float | None = None) -> None:
        try:
            if not self.done:
                self._engine.wait(self, timeout)
        finally:
            if self.done:
                self.complete_future()
        if self.error is not None:
            raise self.error


class Receive(SharedOperation):
    """A receive; `messages` fills its buffer. source: a group rank; None: any."""

    def __init__(
        self,
        engine: Engine,
        buffer: torch.Tensor,
        source: int | None,
        tag: int,
        timeout: float,
        finish: Callable[[], None],
        outputs: Sequence,
    ) -> None:
        super().__init__(engine, "recv", iter(()), timeout, outputs)
        self.buffer, self.wanted, self.tag, self.finish = buffer, source, tag, finish


class Engine:
    """The operations of this process in one group.

    inboxes: `messages.Inboxes`. members: pidfds of the other processes, by rank.
    """

    def __init__(self, segment: Segment, inboxes: Any, members: dict[int, int]) -> None:
        self.segment = segment
        self.failure: Exception | None = None  # after it, the ranks are no longer in step
        self.closed = False
        self._lock = threading.Lock()
        self._collectives: deque[SharedOperation] = deque()
        self._sends: list[SharedOperation] = []
        self._unfinished: dict[SharedOperation, None] = {}
        self._ended: list[SharedOperation] = []  # whose futures are to be completed
        self._inboxes = inboxes
        self._seen: list[int] = []  # of each bell, before the last look at what it announces
        self._members = members
        self._poll = select.poll()
        for descriptor in members.values():
            self._poll.register(descriptor, select.POLLIN)
        self._looked = 0.0  # when the processes of the others were last looked at
        self._spins = segment.size <= len(os.sched_getaffinity(0))
        self._left_alone: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start_collective(self, operation: SharedOperation, alone: bool) -> None:
        """Begin a collective. alone: the caller may not wait for it at once."""
        with self._lock:
            self._check(operation.name)
            self._unfinished[operation] = None
            self._collectives.append(operation)
        self.advance()
        if not operation.done and alone:
            self._leave_alone(0.0)

    def start_message(self, operation: SharedOperation) -> None:
        """Begin a send or a receive."""
        with self._lock:
            self._check(operation.name)
            self._unfinished[operation] = None
            if isinstance(operation, Receive):
                self._inboxes.post(operation)
            else:
                self._sends.append(operation)
        self.advance()
        if not operation.done:
            self._leave_alone(_PATIENCE)

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
            if self._sends:
                self._sends = [send for send in self._sends if not self._step(send)]
            for received in self._inboxes.advance():
                self._end(received)
            if bells[own] == self._seen[own]:
                return

    def _step(self, operation: SharedOperation) -> bool:
        """Move an operation on; return whether it is over."""
        try:
            operation.needs = next(operation.steps)
            return False
        except StopIteration:
            self._end(operation)
        except (RuntimeError, ValueError) as error:
            self._fail(operation, error)
        except BaseException:  # raised by a signal handler
            self._fail(operation, RuntimeError(f"{operation.name} was interrupted"))
            raise
        return True

    def _end(self, operation: SharedOperation, error: Exception | None = None) -> None:
        """Mark an operation as done; it may have been given up before."""
        if not operation.done:
            operation.error = operation.error or error
            operation.done = True
            self._ended.append(operation)
        self._unfinished.pop(operation, None)

    def _fail(self, operation: SharedOperation, error: Exception) -> None:
        """End an operation that has failed; after a collective, no other one can follow."""
        is_collective = operation in self._collectives
        self._end(operation, error)
        if is_collective:
            self.failure = error
            for other in self._collectives:
                self._end(other, error)
            self._collectives.clear()

    def _give_up(self, operation: SharedOperation, error: Exception) -> None:
        """Fail an operation from outside, unless it has ended meanwhile."""
        with self._lock:
            if not operation.done:
                if isinstance(operation, Receive):
                    self._inboxes.withdraw(operation)
                self._fail(operation, error)
        self.advance()

    # Waiting

    def wait(self, operation: SharedOperation, timeout: float | None) -> None:
        """Wait until an operation is done. Raises RuntimeError after `timeout` seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        operation.waiting += 1
        try:
            while True:
                self.advance()
                if operation.done:
                    return
                now = time.monotonic()
                self._enforce(operation, now)
                if operation.done:
                    return
                if limit is not None and now > limit:
                    raise timeout_error(operation.name, timeout or 0.0)
                ends = operation.deadline if limit is None else min(limit, operation.deadline)
                self._sleep([operation], min(_SLICE, max(0.0, ends - now)), self._spins)
        finally:
            operation.waiting -= 1
            if not operation.done and self._thread is not None:
                self._left_alone.put(0.0)

    def _sleep(self, operations: Sequence[SharedOperation], seconds: float, spins: bool) -> None:
        """Sleep until what the operations need has changed. spins: look at the bell first."""
        with self._lock:
            if self.closed or any(operation.done for operation in operations):
                return
            watched: set[int] = set()
            for operation in operations:
                needs = self._needs(operation)
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
        futex.sleep_for_any([(addresses[rank], seen[rank]) for rank in watched], seconds)

    def _needs(self, operation: SharedOperation) -> Needs:
        """Return the ranks that an operation waits for."""
        if isinstance(operation, Receive):
            return self._inboxes.needs(operation)
        # Collectives wait for the first of them.
        return (self._collectives[0] if operation in self._collectives else operation).needs

    def _enforce(self, operation: SharedOperation, now: float) -> None:
        """Fail an operation after its timeout, or if it needs a process that has ended."""
        if now > operation.deadline:
            self._give_up(operation, timeout_error(operation.name, operation.timeout))
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
            needs = self._needs(operation) if not operation.done else ()
        any_is_enough = isinstance(operation, Receive)
        missing = [rank for rank in needs if rank in dead]
        if missing and (not any_is_enough or len(missing) == len(set(needs) - {self.segment.rank})):
            error = f"{operation.name} failed: the process of rank {missing[0]} has ended"
            self._give_up(operation, RuntimeError(error))

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
                for operation in alone:
                    if not operation.done:
                        self._enforce(operation, now)
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
            for operation in list(self._unfinished):
                self._end(operation, error)
            self._collectives.clear()
            ended, self._ended = self._ended, []
        for operation in ended:
            operation.complete_future()
        self._left_alone.put(None)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout=5)
        for descriptor in self._members.values():
            os.close(descriptor)
        self._members = {}
