"""Operations under way: MPI's requests, and the thread that polls them.

MPI makes progress only inside its own calls. Without the thread, a future would never complete
and a large message would stall while the learner's code computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from ddp_kit.backends.mpi import load_mpi
from ddp_kit.backends.process_group import PythonWork, call_back, timeout_error

# Held around every call of MPI. The calls are nonblocking, so nobody holds it for long.
lock = threading.Lock()

_SPIN = 0.001  # seconds for which `wait` only yields the core
_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.00005, 0.001  # of `wait`, after that
_WATCH_INTERVAL, _FUTURE_INTERVAL = 0.001, 0.0001  # of the thread; the second if there is a future

_unfinished: dict[MPIWork, None] = {}  # it keeps the tensors alive that MPI reads or writes
# MPI may still write into the tensors of an operation that timed out or did not start as a whole:
# its steps, which hold that memory, are never freed.
_given_up: list[list[Iterator[Any]]] = []


def format_error(name: str, error: Exception) -> str:
    """Return the message for an operation that failed in MPI, on one line."""
    return f"{name} failed in MPI: {' '.join(str(error).split())}"


class MPIWork(PythonWork):
    """Nonblocking calls of MPI that together are one operation of PyTorch.

    name: for errors. steps: each yields a request; the rest runs once all requests are complete.
    timeout: seconds from now. outputs: the result of the future. finish: what to do at the end.
    expected: the number of bytes to receive.

    Raises MPI.Exception if MPI refuses a call, and ValueError if a call does.
    """

    def __init__(
        self,
        name: str,
        steps: Iterable[Iterator[Any]],
        timeout: float,
        outputs: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
        expected: int | None = None,
    ) -> None:
        super().__init__(name, outputs)
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._finish = finish
        self._expected = expected
        self._status = None if expected is None else load_mpi().Status()
        self._completer: int | None = None  # the thread that completes it now, or has completed it
        self._awaited = False
        self._steps = list(steps)
        try:
            self._requests = [next(each) for each in self._steps]
        except BaseException:
            _given_up.append(self._steps)
            raise
        _unfinished[self] = None
        _wake_watcher()

    def is_completed(self) -> bool:
        """Return whether it is done; the first thread that finds it complete does the rest."""
        if self.done:
            return True
        with lock:
            mine = self._completer == threading.get_ident()  # a signal handler interrupted it
            if self._completer is not None and not mine:
                return self.done
            complete = mine or self._test()
            if complete:
                self._completer = threading.get_ident()
        if complete:
            self._complete()
        return self.done

    def watch(self) -> None:
        """Poll it for the watcher, and fail it after its timeout."""
        if not self._awaited and not self.is_completed() and time.monotonic() > self._deadline:
            self._time_out()

    def _wait(self, seconds: float | None) -> None:
        start = now = time.monotonic()
        deadline = self._deadline if seconds is None else start + seconds
        self._awaited = True
        try:
            while not self.is_completed():
                now = time.monotonic()
                if now > self._deadline:
                    self._time_out()
                elif now > deadline:
                    raise timeout_error(self.name, seconds or 0.0)
                elif now - start < _SPIN:
                    time.sleep(0)
                else:
                    time.sleep(min(_LONGEST_SLEEP, max(_SHORTEST_SLEEP, (now - start) / 50)))
        finally:
            self._awaited = False

    def cancel(self) -> None:
        """Cancel a receive; MPI can cancel nothing else. The caller holds the lock."""
        if self._expected is not None:
            for request in self._requests:
                request.Cancel()

    def _test(self) -> bool:
        """Return whether all requests are complete, or one failed."""
        MPI = load_mpi()
        try:
            while self._requests:
                request = self._requests[-1]
                if self._expected is None:
                    if not request.Test():
                        return False
                # A request is false if it completed before, and a signal handler interrupted us.
                elif request and not request.Test(self._status):
                    return False
                else:
                    self._check_message(MPI)
                self._requests.pop()
        except MPI.Exception as error:
            self._requests.pop()
            self.error = RuntimeError(format_error(self.name, error))
        return True

    def _check_message(self, MPI: ModuleType) -> None:
        """Note where a message came from; fail if it does not fill the tensor."""
        self.source = self._status.Get_source()
        received = self._status.Get_count(MPI.BYTE)
        if received != self._expected:
            self.error = RuntimeError(
                f"{self.name} got {received} bytes from rank {self.source}, "
                f"but the tensor has {self._expected}"
            )

    def _time_out(self) -> None:
        with lock:
            if self._completer is not None:
                return
            self.error = timeout_error(self.name, self._timeout)
            self._completer = threading.get_ident()
            self.cancel()
        self._complete()

    def _complete(self) -> None:
        """Do what is left, and mark it done. Only one thread gets here, without the lock."""
        steps, self._steps = self._steps, []
        if self._requests:
            _given_up.append(steps)
        try:
            if self.error is None:
                for each in steps:
                    next(each, None)
                if self._finish is not None:
                    self._finish()
        except RuntimeError as error:
            self.error = error
        except BaseException:  # raised by a signal handler
            self.error = RuntimeError(f"{self.name} was interrupted while its result was copied")
            raise
        finally:
            with lock:
                self.done = True
            _unfinished.pop(self, None)
            if threading.current_thread() is _thread:
                call_back([self])
            else:
                self.complete_future()


# The watcher: one thread that polls operations which nobody waits for

_awake = threading.Event()
_stop = threading.Event()
_thread: threading.Thread | None = None


def unfinished() -> list[MPIWork]:
    """Return the operations that are not done."""
    return list(_unfinished)


def stop_watcher() -> None:
    """Stop the thread, for good."""
    _stop.set()
    _awake.set()
    if _thread is not None and _thread.is_alive():
        _thread.join(timeout=5)


def _wake_watcher() -> None:
    global _thread
    _awake.set()
    if _thread is None:
        _thread = threading.Thread(target=_watch, name="ddp_kit.backends.mpi", daemon=True)
        _thread.start()


def _watch() -> None:
    while True:
        _awake.clear()
        if _stop.is_set():
            return
        works = unfinished()
        if not works:
            _awake.wait()
        for work in works:
            work.watch()
        hurry = any(work.has_future for work in works)
        time.sleep(_FUTURE_INTERVAL if hurry else _WATCH_INTERVAL)
