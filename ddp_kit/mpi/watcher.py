"""One thread in a process that looks after operations which nobody waits for.

MPI moves on only inside of its own calls. So a future would never complete, and a large message
would stand still, while the learner's code computes. The thread looks in once a millisecond, ten
times as often while somebody holds a future, and sleeps when nothing has been under way for long.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_kit.mpi.operation import Operation

_PAUSE = 0.001
_SHORT_PAUSE = 0.0001
_IDLE_LOOKS = 100

_unfinished: dict[Operation, None] = {}  # it holds the tensors that MPI reads or writes
_awake = threading.Event()
_end = threading.Event()
_thread: threading.Thread | None = None


def add(operation: Operation) -> None:
    """Look after an operation until it is complete, or failed."""
    global _thread
    _unfinished[operation] = None
    if not _awake.is_set():
        _awake.set()
    if _thread is None:
        _thread = threading.Thread(target=_watch, name="ddp_kit.mpi", daemon=True)
        _thread.start()


def remove(operation: Operation) -> None:
    """Forget an operation that is over."""
    _unfinished.pop(operation, None)


def unfinished() -> list[Operation]:
    """Return what is under way."""
    return list(_unfinished)


def stop() -> None:
    """End the thread, for good."""
    _end.set()
    _awake.set()
    if _thread is not None and _thread.is_alive():
        _thread.join(timeout=5)


def _watch() -> None:
    idle = 0
    while not _end.is_set():
        operations = unfinished()
        idle = 0 if operations else idle + 1
        if idle > _IDLE_LOOKS:
            idle = 0
            _awake.clear()
            if not _unfinished:  # nothing was added since
                _awake.wait()
        hurry = False
        for operation in operations:
            operation.attend()
            hurry = hurry or operation.has_future
        time.sleep(_SHORT_PAUSE if hurry else _PAUSE)
