"""One communication that was started: what MPI has of it, and what is to do when it is over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
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
        self._status = None if expected is None else library.load().Status()
        self._ender: int | None = None  # the thread that ends it now, or has ended it
        self._awaited = False
        self._future: Future | None = None
        self._given: Future | None = None
        watcher.add(self)

    def look(self) -> bool:
        """Tell whether it is over; what is left to do is done by whoever notices first."""
        if self.done:
            return True
        with library.lock:
            mine = self._ender == threading.get_ident()  # a signal broke in before it was over
            if self._ender is not None and not mine:
                return self.done
            over = mine or self._test()
            if over:
                self._ender = threading.get_ident()
        if over:
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
            if self._ender is not None:
                return
            self.error = self._too_late(self._timeout)
            self._ender = threading.get_ident()
            _given_up.append(self)
            self.cancel()
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
                future = self._future = Future()
                # The exception must come out of a callback. One that is set as a result, which is
                # what Future.set_exception does, looks like success to PyTorch's C++ (DDP).
                self._given = future.then(lambda _: self._result())
                self.has_future = True
                over = self.done
            else:
                over = False
        if over:
            future.set_result(None)
        return self._given

    def _result(self) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs

    def _test(self) -> bool:
        """Ask MPI whether all requests are complete, or one failed."""
        MPI = library.load()
        try:
            while self._requests:
                request = self._requests[-1]
                if self._expected is None:
                    if not request.Test():
                        return False
                # A request is false when it was complete before: a signal broke in then.
                elif request and not request.Test(self._status):
                    return False
                else:
                    self._note_message(MPI)
                self._requests.pop()
        except MPI.Exception as error:
            self.error = RuntimeError(f"{self.name} failed in MPI: {library.say(error)}")
        return True

    def _note_message(self, MPI: ModuleType) -> None:
        """Note where a message came from; refuse one that does not fill the tensor."""
        self.source = self._status.Get_source()
        came = self._status.Get_count(MPI.BYTE)
        if came != self._expected:
            self.error = RuntimeError(
                f"{self.name} got {came} bytes from rank {self.source}, "
                f"and the tensor has {self._expected}"
            )

    def _end(self) -> None:
        """Do what is left, and tell everybody. One thread comes here, without the lock."""
        finish, self._finish = self._finish, None
        try:
            if finish is not None and self.error is None:
                finish()
        except RuntimeError as error:
            self.error = error
        except BaseException:  # a signal broke in
            self.error = RuntimeError(f"{self.name} was interrupted while its result was copied")
            raise
        finally:
            self._tell()

    def _tell(self) -> None:
        """Let everybody know that it is over."""
        with library.lock:
            self.done = True
            future, self._future = self._future, None
            if not self._requests:
                self._held = None
        watcher.remove(self)
        if future is not None:
            future.set_result(None)

    def _too_late(self, seconds: float) -> RuntimeError:
        after = round(seconds * 1000)
        return RuntimeError(f"Timed out waiting {after}ms for {self.name} operation to complete")
