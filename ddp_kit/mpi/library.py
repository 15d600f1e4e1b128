"""The MPI library in this process: loaded when first used, and called under one lock."""

from __future__ import annotations

import functools
import sys
import threading
from types import ModuleType

from ddp_kit.errors import BackendError
from ddp_kit.mpi import launcher

# Held around every call of MPI. The calls are nonblocking, so nobody holds it for long.
lock = threading.Lock()


@functools.cache
def load() -> ModuleType:
    """Import and return mpi4py.MPI; `lifecycle.initialize` initializes MPI.

    Raises BackendError if mpi4py or the MPI library cannot be loaded.
    """
    launcher.require_package()
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=False, thread_level="multiple")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendError(
            f"mpi4py cannot load an MPI library ({reason}); {launcher.INSTALL}"
        ) from None
    return MPI


def format_error(name: str, error: Exception) -> str:
    """Return the message for an operation that failed in MPI, on one line."""
    return f"{name} failed in MPI: {' '.join(str(error).split())}"
