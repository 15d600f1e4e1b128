"""The process group: its names and timeout, how operations start, and point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.mpi import buffers, work
from ddp_kit.mpi.launcher import load_mpi
from ddp_kit.mpi.work import MPIWork, Operation

Tensors = Sequence[Tensor]


class BaseProcessGroup(dist.ProcessGroup):
    """A group over an MPI communicator; `MPIProcessGroup` adds the collectives.

    timeout: seconds until an operation fails. frees_communicator: whether `shutdown` does.
    """

    def __init__(self, communicator: Any, timeout: float, frees_communicator: bool = True) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._communicator = communicator
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()
        self._timeout = timeout
        self._frees_communicator = frees_communicator
        self._name = self._description = ""

    # PyTorch's C++ calls these by name

    def getBackendName(self) -> str:
        """Return "mpi4py"."""
        return "mpi4py"

    def getGroupName(self) -> str:
        """Return PyTorch's name for the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set PyTorch's name for the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the `group_desc` of `new_group`."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the `group_desc` of `new_group`."""
        self._description = description

    def _get_backend(self, device: torch.device) -> BaseProcessGroup:
        """Return the group itself, for `dist.batch_isend_irecv` of PyTorch 2.15 and newer."""
        return self

    @property
    def timeout(self) -> timedelta:
        """The time after which an operation fails."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that start from now on."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Free the communicator; `dist.destroy_process_group` calls this."""
        communicator, self._communicator = self._communicator, None
        if communicator is None or not self._frees_communicator or work.unfinished():
            return  # MPI_Finalize frees it
        with work.lock:
            communicator.Free()

    def abort(self) -> None:
        """Do the same as `shutdown`, because MPI cannot cancel a collective."""
        self.shutdown()

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> MPIWork:
        """Send one tensor."""
        (tensor,) = tensors
        source = buffers.send_buffer(tensor)
        message = buffers.describe(source)
        return self._start(
            "send", lambda comm: [comm.Isend(message, dstRank, tag)], outputs=tensors, memory=source
        )

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> MPIWork:
        """Receive one tensor."""
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MPIWork:
        """Receive one tensor from any rank; `Work._source_rank` returns which rank sent it."""
        return self._receive(tensors, load_mpi().ANY_SOURCE, tag)

    def _receive(self, tensors: Tensors, source: int, tag: int) -> MPIWork:
        (tensor,) = tensors
        buffer = buffers.receive_buffer(tensor)
        message = buffers.describe(buffer)
        return self._start(
            "recv",
            lambda comm: [comm.Irecv(message, source, tag)],
            lambda: buffers.copy_back([tensor], [buffer]),
            outputs=tensors,
            expected=buffer.nbytes,
        )

    def barrier(self, opts: Any = None) -> MPIWork:
        """Wait until all ranks of the group call this."""
        return self._start("barrier", lambda comm: [comm.Ibarrier()], opts=opts)

    def _start(
        self,
        name: str,
        begin: Callable[[Any], list[Any]],
        finish: Callable[[], None] | None = None,
        outputs: Tensors = (),
        *,
        opts: Any = None,
        memory: Any = None,
        expected: int | None = None,
    ) -> MPIWork:
        """Start an operation. begin: call MPI with the communicator, and return its requests.

        opts: PyTorch's options, whose timeout takes precedence over the group's. For the
        others see `Operation`.
        """
        if self._communicator is None:
            raise RuntimeError(f"{name}: this process group was destroyed")
        with work.lock:
            try:
                requests = begin(self._communicator)
            except load_mpi().Exception as error:
                raise RuntimeError(work.format_error(name, error)) from None
        own = 0.0 if opts is None else opts.timeout.total_seconds()
        timeout = own if own > 0 else self._timeout
        return MPIWork(Operation(name, requests, timeout, finish, outputs, memory, expected))

    def _check_list(self, name: str, tensors: Tensors, own: Tensor | None, side: str) -> None:
        """Raise ValueError unless there is a tensor for each rank and this rank's one fits."""
        if len(tensors) != self._size:
            raise ValueError(
                f"{name} needs one {side} tensor for each of the {self._size} ranks, "
                f"got {len(tensors)}"
            )
        buffers.check_dtypes(name, tensors, own)
        here = tensors[self._rank]
        if here.numel() != own.numel():
            raise ValueError(
                f"{name}: {side} tensor {self._rank} has {here.numel()} elements, "
                f"but its counterpart on this rank has {own.numel()}"
            )

    def _check_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Raise ValueError unless a tensor is as large as one part for each rank."""
        buffers.check_dtypes(name, [whole], part)
        if whole.numel() != part.numel() * self._size:
            raise ValueError(
                f"{name} needs a tensor of {self._size} parts of {part.numel()} elements, "
                f"got {whole.numel()} elements"
            )
