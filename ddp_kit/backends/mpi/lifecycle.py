"""A process in MPI from start to end: initialize MPI, create process groups, finalize MPI."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ddp_kit.backends.engine import timeout_error
from ddp_kit.backends.mpi import load_mpi
from ddp_kit.backends.mpi.process_group import MPIProcessGroup, engines, lock
from ddp_kit.errors import BackendError

_FIRST_TAG, _TAGS = 16384, 16000  # MPI guarantees tags up to 32767


class _AtExit:
    """What is needed when the process ends."""

    communicator: Any = None  # of the first group, whose ranks finalize MPI together
    timeout: float = 0.0  # the longest of any group, in seconds


@functools.cache
def initialize() -> ModuleType:
    """Initialize MPI, finalize it when Python ends, and return mpi4py.MPI.

    MPI_THREAD_MULTIPLE is requested, so that a program may call mpi4py itself beside PyTorch.
    MPI_THREAD_SERIALIZED is enough for this package, which holds one lock around all its calls.
    Raises BackendError if MPI cannot be loaded, or was initialized for a single thread.
    """
    MPI = load_mpi()
    mpi4py_finalizes = MPI.Is_initialized()  # the program imported mpi4py.MPI before
    if not mpi4py_finalizes:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise BackendError(
            "this process initialized MPI for a single thread; "
            'set mpi4py.rc.thread_level = "multiple" before importing mpi4py.MPI'
        )
    atexit.register(_finalize, MPI, mpi4py_finalizes, os.getpid())
    return MPI


def create_group(options: Any) -> MPIProcessGroup:
    """Return the group that `init_process_group` or `new_group` asks for; all members call this.

    The store in `options` is not used, because mpiexec has connected the ranks already. PyTorch
    itself uses it only if TORCH_DIST_INIT_BARRIER=1 is set or another backend joins: then the
    ranks must share the store. Otherwise `dist.HashStore()` is enough.
    Raises BackendError if the ranks are not those that mpiexec started.
    """
    MPI = initialize()
    size, rank = options.group_size, options.group_rank
    members = list(options.global_ranks_in_group) or list(range(size))
    world = MPI.COMM_WORLD
    if size > world.Get_size():
        raise BackendError(
            f"world_size is {size}, but mpiexec started {world.Get_size()} ranks; "
            f"start them with mpiexec -n {size}"
        )
    if members[rank] != world.Get_rank():
        raise BackendError(
            f"rank={members[rank]} was passed to PyTorch in the process that is rank "
            f"{world.Get_rank()} of MPI; take rank and world_size from "
            "ddp_kit.backends.mpi.rank_info()"
        )
    timeout = options.timeout.total_seconds()
    # Not from options.group_id: since PyTorch 2.15 the ranks name a group differently after an
    # attempt to create one that failed on only some of them.
    tag = _FIRST_TAG + zlib.crc32(str(members).encode()) % _TAGS
    _wait_for_members(members, rank, tag, timeout)
    with lock:
        everybody = world.Get_group()
        chosen = everybody.Incl(members)
        communicator = world.Create_group(chosen, tag)
        chosen.Free()
        everybody.Free()
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    # The first group normally has all ranks, so its communicator lives until the process ends.
    first = _AtExit.communicator is None
    if first:
        _AtExit.communicator = communicator
    _AtExit.timeout = max(_AtExit.timeout, timeout)
    return MPIProcessGroup(communicator, timeout, frees_communicator=not first)


def _wait_for_members(members: list[int], rank: int, tag: int, timeout: float) -> None:
    """Wait until all members are creating the group; raise RuntimeError after `timeout`.

    When MPI creates a communicator it waits without a limit, and nothing can interrupt it.
    """
    MPI = load_mpi()
    world, nothing = MPI.COMM_WORLD, [None, 0, MPI.BYTE]

    def receive(peers: Sequence[int]) -> None:
        with lock:
            requests = [world.Irecv(nothing, peer, tag) for peer in peers]
        if not _until(lambda: all(request.Test() for request in requests), timeout):
            with lock:
                for request in requests:
                    request.Cancel()
            raise timeout_error("new_group", timeout)

    def send(peers: Sequence[int]) -> None:
        with lock:
            for peer in peers:
                world.Isend(nothing, peer, tag).Free()

    first, *others = members
    if rank == 0:
        receive(others)
        send(others)
    else:
        send([first])
        receive([first])


def _until(is_complete: Callable[[], bool], seconds: float) -> bool:
    """Ask MPI until something is complete; return False if that takes longer."""
    start = time.monotonic()
    while True:
        with lock:
            if is_complete():
                return True
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(min(0.01, waited / 20))


def _finalize(MPI: ModuleType, mpi4py_finalizes: bool, pid: int) -> None:
    """Call MPI_Finalize once the other ranks end too, because it waits for them without a limit.

    After an uncaught error this process ends without MPI_Finalize; mpiexec notices, and ends the
    others. `sys.exit` leaves no trace that can be seen here: ranks that wait for one that called
    it end after the timeout of their group.
    """
    for engine in list(engines):
        engine.close()
    if os.getpid() != pid or MPI.Is_finalized():
        return
    failed = getattr(sys, "last_value", None) is not None
    if not failed and _wait_for_others():
        if not mpi4py_finalizes:
            MPI.Finalize()
    elif mpi4py_finalizes:  # it would now wait in MPI_Finalize
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


def _wait_for_others() -> bool:
    """Wait until all ranks of the first group end too; return False if some do not in time."""
    if _AtExit.communicator is None:
        return True
    with lock:
        request = _AtExit.communicator.Ibarrier()
    return _until(request.Test, _AtExit.timeout)
