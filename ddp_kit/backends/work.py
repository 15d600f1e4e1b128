"""An operation of a process group that is under way, and the `dist.Work` over it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

_NO_TIMEOUT = timedelta(0)
_lock = threading.Lock()  # around the moment in which an operation ends, for its future
_ended: queue.SimpleQueue[Operation] = queue.SimpleQueue()  # for the threads of callbacks
_idle = threading.Semaphore(0)  # such threads that are free


class Operation:
    """What one call of PyTorch has started; a backend adds `poll` and `wait`.

    name: for errors. outputs: the result of the future. done, error: how it ended. source: the
    group rank that a message came from, or -1. has_future: somebody may not wait for it.
    """

    def __init__(self, name: str, outputs: Sequence[torch.Tensor] = ()) -> None:
        self.name = name
        self.outputs = list(outputs)
        self.done = False
        self.error: Exception | None = None
        self.source = -1
        self.has_future = False
        self._pending: Future | None = None  # to set when done
        self._future: Future | None = None  # what `future` returns

    def poll(self) -> bool:
        """Return whether it is done."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is done. Raises RuntimeError if it failed, or after `timeout` seconds.

        After `timeout` it goes on, and one may wait again; after the group's timeout it has
        failed.
        """
        raise NotImplementedError

    def future(self) -> Future:
        """Return a future of `outputs`, which completes without a call of `wait`."""
        with _lock:
            if self._future is not None:
                return self._future
            pending = self._pending = Future()
            # The exception must come out of a callback. One that is set as a result, which is
            # what Future.set_exception does, looks like success to PyTorch's C++ (DDP).
            self._future = pending.then(lambda _: self._result())
            self.has_future = True
            done = self.done
        if done:
            self.complete_future()
        return self._future

    def complete_future(self) -> None:
        """Run the callbacks of the future, if there is one. It is called once this is done."""
        with _lock:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.set_result(None)

    def _result(self) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs


class PythonWork(dist.Work):
    """The `dist.Work` of one operation, which goes on if this is dropped, unlike with gloo."""

    ends_alone = True  # for the recorder: a message is not lost when its work is dropped

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the operation is complete. Raises RuntimeError if it failed."""
        self._operation.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is done, successful or not."""
        return self._operation.poll()

    def is_success(self) -> bool:
        """Return whether the operation is done and did not fail."""
        return self._operation.poll() and self._operation.error is None

    def exception(self) -> Exception | None:
        """Return why the operation failed."""
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation writes."""
        return self._operation.outputs

    def get_future(self) -> Future:
        """Return a future of `result()`, which completes without a call of `wait`."""
        return self._operation.future()

    def source_rank(self) -> int:
        """Return the group rank that a message came from, or -1 before it is received."""
        return self._operation.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Do nothing: on the CPU there is no stream to synchronize with."""


def call_back(operations: list[Operation]) -> None:
    """Complete the futures of operations in another thread, because the caller moves operations.

    A callback may start an operation and wait for its future, and so may the callback of that one:
    so there are as many threads as callbacks that run at once.
    """
    for operation in operations:
        _ended.put(operation)
        if not _idle.acquire(blocking=False):
            threading.Thread(target=_call_back, name="ddp_kit callbacks", daemon=True).start()


def _call_back() -> None:
    while True:
        _ended.get().complete_future()
        _idle.release()


def timeout_error(name: str, seconds: float) -> RuntimeError:
    """Return the error for an operation that has waited too long, in gloo's words."""
    limit = round(seconds * 1000)
    return RuntimeError(f"[ddp_kit] Timed out waiting {limit}ms for {name} operation to complete")
