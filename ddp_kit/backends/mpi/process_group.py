"""The process group: how operations start, and point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_kit.backends.group.process_group import PythonProcessGroup, Tensors
from ddp_kit.backends.group.tensors import copy_back
from ddp_kit.backends.group.work import PythonWork
from ddp_kit.backends.mpi import buffers, work
from ddp_kit.backends.mpi.launcher import load_mpi
from ddp_kit.backends.mpi.work import MPIOperation


class BaseProcessGroup(PythonProcessGroup):
    """A group over an MPI communicator; `MPIProcessGroup` adds the collectives.

    timeout: seconds until an operation fails. frees_communicator: whether `shutdown` does.
    """

    def __init__(self, communicator: Any, timeout: float, frees_communicator: bool = True) -> None:
        super().__init__("mpi4py", communicator.Get_rank(), communicator.Get_size(), timeout)
        self._communicator = communicator
        self._frees_communicator = frees_communicator

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

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> PythonWork:
        """Send one tensor."""
        (tensor,) = tensors
        source = buffers.send_buffer(tensor)
        message = buffers.describe(source)
        return self._start(
            "send", lambda comm: [comm.Isend(message, dstRank, tag)], outputs=tensors, memory=source
        )

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> PythonWork:
        """Receive one tensor."""
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PythonWork:
        """Receive one tensor from any rank; `Work._source_rank` returns which rank sent it."""
        return self._receive(tensors, load_mpi().ANY_SOURCE, tag)

    def _receive(self, tensors: Tensors, source: int, tag: int) -> PythonWork:
        (tensor,) = tensors
        buffer = buffers.receive_buffer(tensor)
        message = buffers.describe(buffer)
        return self._start(
            "recv",
            lambda comm: [comm.Irecv(message, source, tag)],
            lambda: copy_back([tensor], [buffer]),
            outputs=tensors,
            expected=buffer.nbytes,
        )

    def barrier(self, opts: Any = None) -> PythonWork:
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
    ) -> PythonWork:
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
        timeout = self._timeout_of(opts)
        operation = MPIOperation(name, requests, timeout, finish, outputs, memory, expected)
        return PythonWork(operation)
