"""What the calls of a Python backend have started, and the threads that move it on.

Each operation is a generator, which does what it can and then yields. Collectives run one after
another, in the order in which they were started. Messages to one rank are written in that order,
too.

`advance` moves everything as far as it goes, without waiting. A thread in `wait` calls it, sleeps
until a rank that it needs may have done something, and calls it again. A thread of the group does
the same for operations that no other thread waits for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

# What is left of an operation. It yields whenever it has to wait: the ranks of which one must act,
# or what a signal handler has raised in it, if it can go on after that.
Steps = Iterator[Collection[int] | BaseException]

_SLICE = 0.07  # seconds of a sleep, after which the time limits are checked
_PATIENCE = 0.0005  # seconds that the thread leaves to a caller who may be about to wait
_NO_TIMEOUT = timedelta(0)
_future_lock = threading.Lock()  # around the moment in which an operation ends, for its future
# The steps of operations that were given up. Another rank may still write into the memory that they
# hold, so it is never freed.
_given_up: list[Steps] = []


class Bells(Protocol):
    """What tells an engine that ranks have done something. announced: how often this one has."""

    announced: int

    def look(self) -> Any:
        """Return what is different whenever a rank has done something."""

    def sleep(self, seen: Any, needs: Collection[int], seconds: float, waited: float) -> None:
        """Sleep until one of these ranks has done something after `seen`, or may have.

        seconds: at most. waited: for how long the caller has waited before.
        """


class PythonWork(dist.Work):
    """What one call has started. It goes on if this is dropped, unlike with gloo.

    engine: moves it on. call: a `process_group.Call`. done, error: how it ended. source: the group
    rank that a message came from, or -1.
    """

    ends_alone = True  # for the recorder: a message is not lost when its work is dropped

    def __init__(self, engine: Engine, call: Any, is_collective: bool = False) -> None:
        super().__init__()
        self._engine = engine
        self.is_collective, self.is_async = is_collective, call.is_async
        self.name, self.outputs = call.name, list(call.outputs)
        self.timeout, self.deadline = call.timeout, time.monotonic() + call.timeout
        self.steps: Steps = iter(())
        self.needs: Collection[int] = ()  # the ranks that it waits for
        self.waiting = 0  # threads
        self.done = False
        self.error: Exception | None = None
        self.source = -1
        self._pending: Future | None = None  # to set when done
        self._future: Future | None = None  # what `get_future` returns

    def is_completed(self) -> bool:
        """Return whether it is done. The group's thread moves it on, so a signal cannot end it."""
        if self.done:
            self.complete_future()
        else:
            time.sleep(0)  # lets that thread have the GIL
        return self.done

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the operation is complete. Raises RuntimeError if it failed.

        After `timeout` it goes on, and one may wait again; after the group's it has failed.
        """
        try:
            if not self.done:
                limited = timeout > _NO_TIMEOUT
                self._engine.wait(self, timeout.total_seconds() if limited else None)
        finally:
            if self.done:
                self.complete_future()
        if self.error is not None:
            raise self.error
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def result(self) -> list[Tensor]:
        return self.outputs

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Do nothing: on the CPU there is no stream to synchronize with."""

    def get_future(self) -> Future:
        """Return a future of `result()`, which completes without a call of `wait`."""
        with _future_lock:
            if self._future is not None:
                return self._future
            pending = self._pending = Future()
            # The exception must come out of a callback. One that is set as a result, which is
            # what Future.set_exception does, looks like success to PyTorch's C++ (DDP).
            self._future = pending.then(lambda _: self._outcome())
            done = self.done
        if done:
            self.complete_future()
        return self._future

    @property
    def has_future(self) -> bool:
        return self._future is not None

    def complete_future(self) -> None:
        """Run the callbacks of the future, if there is one. It is called once this is done."""
        with _future_lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.set_result(None)

    def _outcome(self) -> list[Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs


class Engine:
    """The operations of this process in one group."""

    def __init__(self, bells: Bells) -> None:
        self._bells = bells
        self.failure: Exception | None = None  # after it, the ranks are no longer in step
        self.closed = False
        self._lock = threading.Lock()
        self._collectives: deque[PythonWork] = deque()
        self._messages: list[PythonWork] = []
        self._unfinished: dict[PythonWork, None] = {}
        self._ended: list[PythonWork] = []  # whose futures are to be completed
        self._seen = bells.look()  # before the last look at what they announce
        self._left_alone: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: PythonWork, steps: Steps) -> PythonWork:
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
        # A thread that waits for one completes its future itself. The other futures have threads of
        # their own, because a callback may start an operation and wait for it.
        for work in ended:
            if work.has_future and not work.waiting:
                name, target = "ddp_kit callback", work.complete_future
                threading.Thread(target=target, name=name, daemon=True).start()

    def _advance(self) -> None:
        while True:
            self._seen, announced = self._bells.look(), self._bells.announced
            while self._collectives and self._step(self._collectives[0]):
                if self._collectives:  # a failure clears it
                    self._collectives.popleft()
            if self._messages:
                self._messages = [message for message in self._messages if not self._step(message)]
            if self._bells.announced == announced:
                return

    def _step(self, work: PythonWork) -> bool:
        try:
            needs = next(work.steps)
        except StopIteration:
            self._end(work)
            return True
        except (RuntimeError, ValueError) as error:
            self._fail(work, error)
            return True
        except BaseException:  # raised by a signal handler
            self._fail(work, RuntimeError(f"{work.name} was interrupted"))
            raise
        if isinstance(needs, BaseException):
            raise needs
        work.needs = needs
        return False

    def _end(self, work: PythonWork, error: Exception | None = None) -> None:
        """Mark an operation as done; it may have been given up before."""
        if not work.done:
            work.error, work.done = error, True
            self._ended.append(work)
            if error is not None:
                _given_up.append(work.steps)
        self._unfinished.pop(work, None)

    def _fail(self, work: PythonWork, error: Exception) -> None:
        """End an operation that has failed; after a collective, no other one can follow."""
        self._end(work, error)
        if work in self._collectives:
            self.failure = error
            for other in self._collectives:
                self._end(other, error)
            self._collectives.clear()

    def _give_up(self, work: PythonWork) -> None:
        """Fail an operation that has taken too long, unless it has ended meanwhile."""
        with self._lock:
            if not work.done:
                self._fail(work, timeout_error(work.name, work.timeout))
        self.advance()

    # Waiting

    def wait(self, work: PythonWork, timeout: float | None) -> None:
        """Wait until an operation is done. Raises RuntimeError after `timeout` seconds."""
        begun = time.monotonic()
        limit = None if timeout is None else begun + timeout
        work.waiting += 1
        try:
            while True:
                self.advance()
                if work.done:
                    return
                now = time.monotonic()
                if now > work.deadline:
                    self._give_up(work)
                    return
                if limit is not None and now > limit:
                    raise timeout_error(work.name, timeout or 0.0)
                ends = work.deadline if limit is None else min(limit, work.deadline)
                self._sleep([work], min(_SLICE, max(0.0, ends - now)), now - begun)
        finally:
            work.waiting -= 1
            if not work.done and self._thread is not None:
                self._left_alone.put(0.0)

    def _sleep(self, operations: Sequence[PythonWork], seconds: float, waited: float) -> None:
        """Sleep until a rank that they need has done something, unless one is done."""
        with self._lock:
            if self.closed or any(work.done for work in operations):
                return
            first = self._collectives[0].needs if self._collectives else ()
            needs = {rank for w in operations for rank in (first if w.is_collective else w.needs)}
            seen = self._seen
        self._bells.sleep(seen, needs, seconds, waited)

    # The thread

    def _leave_alone(self, patience: float) -> None:
        if self._thread is None:
            name, target = "ddp_kit backend", self._move_alone
            self._thread = threading.Thread(target=target, name=name, daemon=True)
            self._thread.start()
        self._left_alone.put(patience)

    def _move_alone(self) -> None:
        """Move what no thread waits for, until None comes. It runs in a thread of the group."""
        while (patience := self._left_alone.get()) is not None:
            if patience:
                time.sleep(patience)
            begun = time.monotonic()
            while alone := [each for each in list(self._unfinished) if not each.waiting]:
                self.advance()
                now = time.monotonic()
                for work in alone:
                    if not work.done and now > work.deadline:
                        self._give_up(work)
                alone = [each for each in alone if not each.done]
                if alone:
                    self._sleep(alone, _SLICE, now - begun)

    def close(self) -> bool:
        """End what is unfinished, and the thread; return whether anything was unfinished."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            error = RuntimeError("this process group was destroyed")
            unfinished = list(self._unfinished)
            for work in unfinished:
                self._end(work, error)
            self._collectives.clear()
            for message in self._messages:
                self._step(message)  # so that a receive takes itself back
            ended, self._ended = self._ended, []
        for work in ended:
            work.complete_future()
        self._left_alone.put(None)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout=5)
        return bool(unfinished)


def timeout_error(name: str, seconds: float) -> RuntimeError:
    """Return the error for an operation that has waited too long, in gloo's words."""
    limit = round(seconds * 1000)
    return RuntimeError(f"[ddp_kit] Timed out waiting {limit}ms for {name} operation to complete")
