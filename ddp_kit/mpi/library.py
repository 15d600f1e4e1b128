"""The MPI library in this process: loaded when first asked for, and left when Python ends."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any

from ddp_kit.errors import BackendError
from ddp_kit.mpi import command, watcher

# Around every call of MPI. The calls are nonblocking, so nobody holds it for long.
lock = threading.Lock()


class _Leaving:
    """What the end of this process needs to know."""

    communicator: Any = None  # of the first group: its ranks leave together
    seconds: float = 0.0  # how long one waits for the others


@functools.cache
def load() -> ModuleType:
    """Import mpi4py.MPI, initialise MPI once, and have this process leave it in good order.

    MPI_THREAD_MULTIPLE is asked for, so that a program may call mpi4py itself beside PyTorch.
    MPI_THREAD_SERIALIZED is enough for the kit: it has one lock around all of its calls.
    Raises BackendError where mpi4py or the MPI library cannot be loaded.
    """
    command.require_package()
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=False, thread_level="multiple")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendError(
            f'mpi4py finds no MPI library ({reason}); pip install "ddp_kit[mpi]"'
        ) from None
    ends_itself = MPI.Is_initialized()  # the program had imported mpi4py.MPI before
    if not ends_itself:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise BackendError(
            "this process initialised MPI for a single thread; "
            'set mpi4py.rc.thread_level = "multiple" before it imports mpi4py.MPI'
        )
    atexit.register(_leave, MPI, ends_itself, os.getpid())
    return MPI


def say(error: Exception) -> str:
    """Return what MPI says of an error, without its number."""
    return " ".join(str(error).split())


def will_leave_with(communicator: Any, seconds: float) -> None:
    """Note whom to wait for at the end. The first group counts: it holds all ranks as a rule."""
    _Leaving.communicator = _Leaving.communicator or communicator
    _Leaving.seconds = max(_Leaving.seconds, seconds)


def leaves_with(communicator: Any) -> bool:
    """Tell whether the end of the process needs this communicator."""
    return communicator is _Leaving.communicator


def _leave(MPI: ModuleType, ends_itself: bool, pid: int) -> None:
    """Call MPI_Finalize, but only once the others are there: it waits for them without an end.

    After an uncaught error this process ends without it. mpiexec notices, and ends the others.
    Python does not tell that `sys.exit` was called: ranks that wait for one that did so end after
    the time-out of their group.
    """
    watcher.stop()
    if os.getpid() != pid or MPI.Is_finalized():
        return
    failed = getattr(sys, "last_value", None) is not None
    if not failed and _meet_others():
        if not ends_itself:
            MPI.Finalize()
    elif ends_itself:  # mpi4py would now wait in MPI_Finalize
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def _meet_others() -> bool:
    """Wait until all ranks of the first group end too; False: some did not in time."""
    if _Leaving.communicator is None:
        return True
    with lock:
        for operation in watcher.unfinished():
            operation.cancel()
        request = _Leaving.communicator.Ibarrier()
    started = time.monotonic()
    while True:
        with lock:
            if request.Test():
                return True
        waited = time.monotonic() - started
        if waited > _Leaving.seconds:
            return False
        time.sleep(min(0.01, waited / 20))
