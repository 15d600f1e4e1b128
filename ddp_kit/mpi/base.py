"""What all operations of a process group have in common: its ranks, its start, its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.mpi import library, watcher
from ddp_kit.mpi.operation import Operation
from ddp_kit.mpi.work import MPIWork


class BaseGroup(dist.ProcessGroup):
    """A group over an MPI communicator. timeout: seconds until an operation is given up."""

    def __init__(self, communicator: Any, timeout: float) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._communicator = communicator
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()
        self._timeout = timeout
        self._name = self._description = ""

    # PyTorch's C++ asks by these names

    def getBackendName(self) -> str:
        """Return "mpi4py"."""
        return "mpi4py"

    def getGroupName(self) -> str:
        """Return what PyTorch calls the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name that PyTorch gives."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return `group_desc` of `new_group`."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take the description that PyTorch gives."""
        self._description = description

    def _get_backend(self, device: torch.device) -> BaseGroup:
        """Return the group itself, for `dist.batch_isend_irecv` of PyTorch 2.15 and newer."""
        return self

    @property
    def timeout(self) -> timedelta:
        """After how long an operation is given up."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit the operations that start from now on."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Free the communicator; `dist.destroy_process_group` calls this."""
        communicator, self._communicator = self._communicator, None
        if communicator is None or library.leaves_with(communicator) or watcher.unfinished():
            return  # MPI_Finalize frees it
        with library.lock:
            communicator.Free()

    def abort(self) -> None:
        """Do as `shutdown` does: MPI cannot take back a collective."""
        self.shutdown()

    def _start(
        self,
        name: str,
        begin: Callable[[Any], list[Any]],
        finish: Callable[[], None] | None = None,
        outputs: Sequence[torch.Tensor] = (),
        *,
        opts: Any = None,
        held: Any = None,
        expected: int | None = None,
    ) -> MPIWork:
        """Start what `begin` asks of the communicator. held: memory that MPI reads meanwhile."""
        if self._communicator is None:
            raise RuntimeError(f"{name}: this process group was destroyed")
        with library.lock:
            try:
                requests = begin(self._communicator)
            except library.load().Exception as error:
                raise RuntimeError(f"{name} failed in MPI: {library.say(error)}") from None
        own = None if opts is None else opts.timeout.total_seconds()
        limit = self._timeout if own is None or own <= 0 else own
        operation = Operation(name, requests, limit, finish, outputs, held, expected)
        return MPIWork(operation)

    def _check_list(
        self, name: str, tensors: Sequence[torch.Tensor], own: torch.Tensor | None, side: str
    ) -> None:
        """Refuse a list without one tensor for each rank, or whose entry here does not fit."""
        if len(tensors) != self._size:
            raise ValueError(
                f"{name} needs one {side} tensor for each of the {self._size} ranks, "
                f"got {len(tensors)}"
            )
        check_dtypes(name, tensors, own)
        here = tensors[self._rank]
        if here.numel() != own.numel():
            raise ValueError(
                f"{name}: {side} tensor {self._rank} has {here.numel()} elements, "
                f"and its counterpart on this rank has {own.numel()}"
            )

    def _check_whole(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Refuse a tensor that is not as large as one part for each rank."""
        check_dtypes(name, [whole], part)
        if whole.numel() != part.numel() * self._size:
            raise ValueError(
                f"{name}: {self._size} parts of {part.numel()} elements do not make "
                f"a tensor of {whole.numel()}"
            )


def check_dtypes(name: str, tensors: Sequence[torch.Tensor], other: torch.Tensor) -> None:
    """Refuse tensors of several dtypes: they would be taken for each other, bit by bit."""
    for tensor in tensors:
        if tensor.dtype is not other.dtype:
            raise ValueError(
                f"{name} needs tensors of one dtype, got {tensor.dtype} and {other.dtype}"
            )
