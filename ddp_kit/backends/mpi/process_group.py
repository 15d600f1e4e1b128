"""The process group of `mpi`: how its operations start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ddp_kit.backends.mpi import NAME, load_mpi, work
from ddp_kit.backends.mpi.collectives import Call, MPICollectives
from ddp_kit.backends.mpi.work import MPIOperation
from ddp_kit.backends.process_group import PythonProcessGroup, Tensors
from ddp_kit.backends.work import PythonWork


class MPIProcessGroup(PythonProcessGroup):
    """A process group whose messages travel through MPI, on a communicator of its own.

    Every operation starts in the caller's thread, in the order of the program, with a nonblocking
    call of MPI. `Work.wait` polls until it is complete; the watcher of `work` polls what nobody
    waits for, so that futures complete. One lock is held around all calls of MPI.

    MPI uses the memory of the tensors, which must be on the CPU. It is copied only if a tensor is
    not contiguous, for lists of tensors, and if MPI has no type to compute in (see
    `collectives._reduction`).

    A small message is buffered by MPI: `send` then returns before the other rank receives. A
    message that is larger or smaller than the receiver's tensor raises an error there.

    After its timeout an operation raises RuntimeError. MPI cannot cancel a collective: its
    tensors stay reserved, and the ranks should end.

    DistributedDataParallel, with and without a communication hook, and
    `torch.distributed.fsdp.fully_shard` on the CPU work with it; tests/test_mpi.py compares both
    with gloo. Also tried by hand: `fully_shard` on a mesh of two dimensions, in bfloat16, with
    gradient clipping and a full state dict. The README has a table of what this backend lacks.

    timeout: seconds until an operation fails. frees_communicator: whether `shutdown` does.
    """

    def __init__(self, communicator: Any, timeout: float, frees_communicator: bool = True) -> None:
        collectives = MPICollectives(communicator)
        rank, size = communicator.Get_rank(), communicator.Get_size()
        super().__init__(NAME, rank, size, timeout, collectives)
        self._messages = collectives
        self._communicator = communicator
        self._frees_communicator = frees_communicator

    def shutdown(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is None or not self._frees_communicator or work.unfinished():
            return  # MPI_Finalize frees it
        with work.lock:
            communicator.Free()

    def _send(self, data: Tensor, target: int, tag: int, outputs: Tensors) -> PythonWork:
        call = self._messages.send(data.view(-1), target, tag)
        return self._start("send", [call], outputs, None)

    def _receive(
        self,
        buffer: Tensor,
        source: int | None,
        tag: int,
        outputs: Tensors,
        finish: Callable[[], None],
    ) -> PythonWork:
        call = self._messages.receive(buffer.view(-1), source, tag)
        return self._start("recv", [call], outputs, None, finish, expected=buffer.nbytes)

    def _start(
        self,
        name: str,
        calls: Sequence[Call],
        outputs: Tensors,
        opts: Any,
        finish: Callable[[], None] | None = None,
        expected: int | None = None,
    ) -> PythonWork:
        if self._communicator is None:
            raise RuntimeError(f"{name}: this process group was destroyed")
        timeout = self._timeout_of(opts)
        try:
            return PythonWork(MPIOperation(name, calls, timeout, outputs, finish, expected))
        except load_mpi().Exception as error:
            raise RuntimeError(work.format_error(name, error)) from None
