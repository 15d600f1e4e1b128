"""A process group of PyTorch whose messages travel through MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddp_kit.mpi import buffers, library
from ddp_kit.mpi.moves import Moves
from ddp_kit.mpi.sums import Sums
from ddp_kit.mpi.work import MPIWork


class MPIProcessGroup(Moves, Sums):
    """A group with an MPI communicator of its own.

    Every operation starts in the caller's thread, in the order of the program, with a nonblocking
    call of MPI. `Work.wait` polls until it is complete; `ddp_kit.mpi.watcher` looks after what
    nobody waits for, so that futures complete. One lock is around all calls of MPI.

    MPI gets the memory of the tensors, which live on the CPU. It is copied only where a tensor
    does not lie in one piece, for lists of tensors, and where MPI has no type to compute in
    (see `Reduction`).

    A small message is buffered by MPI: `send` then returns before the other rank receives. A
    message that is larger or smaller than the tensor of the receiver raises there.

    After its time-out an operation raises RuntimeError. MPI cannot take back a collective: its
    tensors stay reserved, and the ranks should end.

    On top of it work DistributedDataParallel, with and without a communication hook, and
    `torch.distributed.fsdp.fully_shard` on the CPU; tests/test_mpi.py compares both with gloo.
    Tried by hand besides: `fully_shard` on a mesh of two dimensions, in bfloat16, with gradient
    clipping and a full state dict. `dist.monitored_barrier` and `dist.split_group` are not for
    this backend, and TORCH_DISTRIBUTED_DEBUG=DETAIL checks nothing here.
    """

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> MPIWork:
        """Send one tensor."""
        (tensor,) = tensors
        source = buffers.sent(tensor)
        message = buffers.as_bits(source)
        return self._start(
            "send",
            lambda comm: [comm.Isend(message, dstRank, tag)],
            outputs=tensors,
            held=source,
        )

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> MPIWork:
        """Receive one tensor."""
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> MPIWork:
        """Receive one tensor from whoever sends first; `Work._source_rank` tells who it was."""
        return self._receive(tensors, library.load().ANY_SOURCE, tag)

    def _receive(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> MPIWork:
        (tensor,) = tensors
        place = buffers.received(tensor)
        message = buffers.as_bits(place)
        return self._start(
            "recv",
            lambda comm: [comm.Irecv(message, source, tag)],
            lambda: buffers.copy([tensor], [place]),
            outputs=tensors,
            expected=place.nbytes,
        )

    def barrier(self, opts: Any = None) -> MPIWork:
        """Wait until all ranks are here."""
        return self._start("barrier", lambda comm: [comm.Ibarrier()], opts=opts)
