"""Shared memory as a backend of PyTorch, for ranks on one host, on the stock PyTorch wheel.

    import torch.distributed as dist
    from ddp_kit.backends import shm

    shm.register()
    dist.init_process_group(shm.NAME)

Start it as a program for gloo, for example with torchrun. In `kit.run` and everywhere else in the
kit, `backend="shm"` is enough.

The ranks of a group share one segment of memory that has no name. What they give each other is
written into it in chunks, and read by the others; a rank that waits sleeps until another one wakes
it. Nothing is left of it when the processes have ended, in whatever way.

They meet through PyTorch's store. Rank 0 creates the segment, and writes there where it is: a
descriptor of its own process, which the others open under /proc.
When all have opened it, rank 0 closes the descriptor.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from ddp_kit.backends.engine import timeout_error
from ddp_kit.backends.process_group import PythonProcessGroup
from ddp_kit.backends.shm import segment as segments
from ddp_kit.backends.shm.operations import SharedMemoryOperations
from ddp_kit.backends.shm.segment import ENTERED, Segment
from ddp_kit.errors import BackendError

__all__ = ["NAME", "missing", "register"]

NAME = "shm"
_KEY = "segment"


def missing() -> str | None:
    """Return why this machine cannot run the backend; None if it can."""
    if segments.is_supported:
        return None
    system = "this system" if sys.platform == "linux" else f"{sys.platform!r}"
    return f'backend="shm" needs Linux on a 64-bit processor, and {system} is not; use "gloo"'


def register() -> None:
    """Register the backend "shm" with PyTorch; a second call does nothing.

    Raises BackendError if this is not Linux.
    """
    if problem := missing():
        raise BackendError(problem)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=["cpu"])


class SharedMemoryProcessGroup(PythonProcessGroup):
    """A process group whose ranks share memory, on one host.

    Every operation begins in the caller's thread. `Work.wait` moves it on and sleeps while it
    cannot go on; a thread of the group does the same for operations that nobody waits for.
    Collectives of a group run one after another, in the order of the program.

    `send` ends when the receiving rank has read the message, perhaps while it waits for another
    one. A message that is larger or smaller than the receiver's tensor raises an error there.
    Ranks whose collectives differ in kind, dtype or size get an error that names both, unless one
    of the two is a gather, scatter or all_to_all: then they wait for each other.

    After its timeout an operation raises RuntimeError; nothing looks earlier whether the process of
    another rank has ended. After a collective that failed the group cannot be used again.

    `collectives.combine` says in which order sums are added, and `segment` what the order of stores
    relies on. docs/guide/mpi.md has what this backend lacks.

    timeout: seconds until an operation fails.
    """

    def __init__(self, segment: Segment, timeout: float) -> None:
        operations = SharedMemoryOperations(segment)
        super().__init__(NAME, segment.rank, segment.size, timeout, operations, segment)


def create_group(options: Any, backend_options: Any = None) -> SharedMemoryProcessGroup:
    """Return the group that `init_process_group` or `new_group` asks for; all members call this.

    Raises BackendError if the ranks are not on one host, or cannot see each other's processes;
    RuntimeError if not all of them come within the timeout.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout = options.timeout.total_seconds()
    deadline = time.monotonic() + timeout
    if rank == 0:
        descriptor = segments.create(size)
        store.set(_KEY, f"/proc/{os.getpid()}/fd/{descriptor}")
    else:
        descriptor = _open(_where(store, timeout, deadline), rank, size)
    try:
        segment = Segment(descriptor, rank, size)
        _enter(segment, timeout, deadline)
        return SharedMemoryProcessGroup(segment, timeout)
    finally:
        os.close(descriptor)
        if rank == 0:
            store.delete_key(_KEY)  # so that a later attempt does not find it


def _where(store: Store, timeout: float, deadline: float) -> str:
    """Return the path of rank 0's segment; wait for it. Raise RuntimeError after the timeout."""
    try:
        store.wait([_KEY], timedelta(seconds=timeout))
    except RuntimeError:
        if time.monotonic() < deadline:
            raise
        raise timeout_error("new_group", timeout) from None
    return store.get(_KEY).decode()


def _open(path: str, rank: int, size: int) -> int:
    """Return a descriptor of rank 0's segment. Raise BackendError if this rank cannot share it."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_size == segments.bytes_for(size):
            return descriptor
        os.close(descriptor)
    raise BackendError(
        f'backend="shm": rank {rank} cannot open the shared memory of rank 0; let all ranks run on '
        'one host, in one container and as one user, or use backend="gloo"'
    )


def _enter(segment: Segment, timeout: float, deadline: float) -> None:
    """Write into the segment that this rank has opened it, and wait until all have."""
    words, lines = segment.words, segment.lines
    words[lines[segment.rank] + ENTERED] = 1
    segment.announce()
    while True:
        seen = segment.look()
        late = [rank for rank, line in enumerate(lines) if not words[line + ENTERED]]
        if not late:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise timeout_error("new_group", timeout)
        segment.sleep(seen, late[:1], min(left, 0.1))
