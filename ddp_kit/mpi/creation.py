"""Makes process groups: from the ranks that PyTorch names to a communicator of MPI."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from ddp_kit.errors import BackendError
from ddp_kit.mpi import library
from ddp_kit.mpi.group import MPIProcessGroup
from ddp_kit.mpi.operation import Operation

_FIRST_TAG, _TAGS = 16384, 16000  # MPI promises tags up to 32767


def create_group(options: Any, _: Any = None) -> MPIProcessGroup:
    """Make the group that `init_process_group` or `new_group` asks for. Its members call this.

    The store in `options` is not used: mpiexec has brought the ranks together. PyTorch itself
    uses it only where TORCH_DIST_INIT_BARRIER=1 is set, or another backend joins: then it must be
    one that the ranks share, and else `dist.HashStore()` will do.
    Raises BackendError where the ranks are not those that mpiexec started.
    """
    MPI = library.load()
    size, rank = options.group_size, options.group_rank
    members = list(options.global_ranks_in_group) or list(range(size))
    world = MPI.COMM_WORLD
    if size > world.Get_size():
        raise BackendError(
            f"world_size is {size}, but mpiexec started {world.Get_size()}; "
            f"start the ranks with mpiexec -n {size}"
        )
    if members[rank] != world.Get_rank():
        raise BackendError(
            f"this process is rank {world.Get_rank()} of MPI, and PyTorch was told "
            f"rank={members[rank]}; take rank and world_size from ddp_kit.mpi.place()"
        )
    timeout = options.timeout.total_seconds()
    # Not from options.group_id: since PyTorch 2.15 the ranks name a group differently after an
    # attempt to create one that failed on only some of them.
    tag = _FIRST_TAG + zlib.crc32(str(members).encode()) % _TAGS
    _meet(members, rank, tag, timeout)
    with library.lock:
        everybody = world.Get_group()
        chosen = everybody.Incl(members)
        communicator = world.Create_group(chosen, tag)
        chosen.Free()
        everybody.Free()
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    library.will_leave_with(communicator, timeout)
    return MPIProcessGroup(communicator, timeout)


def _meet(members: list[int], rank: int, tag: int, timeout: float) -> None:
    """Return when all members are here, or raise after `timeout`.

    MPI waits without a limit when it makes a communicator, and nothing can interrupt it.
    """
    MPI = library.load()
    world, nothing = MPI.COMM_WORLD, [None, 0, MPI.BYTE]

    def exchange(send: Sequence[int], receive: Sequence[int]) -> None:
        with library.lock:
            coming = [world.Irecv(nothing, peer, tag) for peer in receive]
            going = [world.Isend(nothing, peer, tag) for peer in send]
        Operation("new_group", going, timeout)
        Operation("new_group", coming, timeout, expected=0).wait()

    first, *others = members
    if rank == 0:
        exchange([], others)
        exchange(others, [])
    else:
        exchange([first], [first])
