"""One communication that was started: what MPI has of it, and what is to do when it is over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future

from ddp_kit.mpi import library, watcher

_SPIN = 0.001  # seconds in which a wait only yields the core
_SHORTEST, _LONGEST = 0.00005, 0.001  # its pauses after that

_yield = getattr(os, "sched_yield", lambda: time.sleep(0))

# MPI may still write into the tensors of an operation that was given up: they are never freed.
_given_up: list[Operation] = []


class Operation:
    """Nonblocking MPI requests that together are one operation of PyTorch.

    name: for errors. requests: as MPI returned them. timeout: seconds from now.
    finish: what to do when all requests are complete. outputs: the result of the future.
    held: other memory that MPI uses. expected: how many bytes a receive must bring.
    """

    def __init__(
        self,
        name: str,
        requests: Sequence[Any],
        timeout: float,
        finish: Callable[[], None] | None = None,
        outputs: Sequence[torch.Tensor] = (),
        held: Any = None,
        expected: int | None = None,
    ) -> None:
        self.name = name
        self.outputs = list(outputs)
        self.done = False
        self.error: Exception | None = None
        self.source = -1
        self.has_future = False
        self._requests = list(requests)
        self._timeout = timeout
        self._limit = time.monotonic() + timeout
        self._finish = finish
        self._held = held
        self._expected = expected
        self._taken = False  # a thread ends it now, or has ended it
        self._awaited = False
        self._future: Future | None = None
        self._given: Future | None = None
        watcher.add(self)

    def look(self) -> bool:
        """Tell whether it is over; what is left to do is done by whoever notices first."""
        if self.done:
            return True
        with library.lock:
            if self._taken:
                return self.done
            try:
                self._taken = self._test()
            except Exception as error:
                self._taken = True
                self.error = RuntimeError(f"{self.name} failed in MPI: {library.say(error)}")
        if self._taken:
            self._end()
        return self.done

    def attend(self) -> None:
        """Look at it, as the watcher does; give it up when its time is over."""
        if not self._awaited and not self.look() and time.monotonic() > self._limit:
            self.give_up()

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is over. Raises RuntimeError if it failed, or after `timeout` seconds.

        After the caller's own `timeout` it goes on, and one may wait again. After the timeout of
        the group it is given up.
        """
        started = now = time.monotonic()
        own_limit = self._limit if timeout is None else started + timeout
        self._awaited = True
        try:
            while not self.look():
                now = time.monotonic()
                if now > self._limit:
                    self.give_up()
                elif now > own_limit:
                    raise self._too_late(timeout)
                elif now - started < _SPIN:
                    _yield()
                else:
                    time.sleep(min(_LONGEST, max(_SHORTEST, (now - started) / 50)))
        finally:
            self._awaited = False
        if self.error is not None:
            raise self.error

    def give_up(self) -> None:
        """Fail with a time-out."""
        with library.lock:
            if self._taken:
                return
            self._taken = True
            self.cancel()
        _given_up.append(self)
        self.error = self._too_late(self._timeout)
        self._end()

    def cancel(self) -> None:
        """Take back a receive; MPI can take back nothing else. The caller has the lock."""
        if self._expected is not None:
            for request in self._requests:
                request.Cancel()

    def future(self) -> Future:
        """Return a future of `outputs`, which completes without anybody waiting."""
        with library.lock:
            if self._given is None:
                self._future = Future()
                # The exception must come out of a callback. One that is set as a result, which is
                # what Future.set_exception does, looks like success to PyTorch's C++ (DDP).
                self._given = self._future.then(lambda _: self._result())
                self.has_future = True
                over = self.done
            else:
                over = False
        if over:
            self._future.set_result(None)
        return self._given

    def _result(self) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs

    def _test(self) -> bool:
        """Ask MPI whether all requests are complete."""
        while self._requests:
            if self._expected is None:
                if not self._requests[-1].Test():
                    return False
            elif not self._test_receive(self._requests[-1]):
                return False
            self._requests.pop()
        return True

    def _test_receive(self, request: Any) -> bool:
        MPI = library.load()
        status = MPI.Status()
        if not request.Test(status):
            return False
        self.source = status.Get_source()
        came = status.Get_count(MPI.BYTE)
        if came != self._expected:
            self.error = RuntimeError(
                f"{self.name} got {came} bytes from rank {self.source}, "
                f"and the tensor has {self._expected}"
            )
        return True

    def _end(self) -> None:
        """Do what is left, and tell everybody. One thread comes here, once, without the lock."""
        if self._finish is not None and self.error is None:
            try:
                self._finish()
            except Exception as error:
                self.error = error
        with library.lock:
            self.done = True
            future = self._future
        watcher.remove(self)
        if self._requests == []:
            self._held = self._finish = None
        if future is not None:
            future.set_result(None)

    def _too_late(self, seconds: float) -> RuntimeError:
        after = round(seconds * 1000)
        return RuntimeError(f"Timed out waiting {after}ms for {self.name} operation to complete")
