"""A process group that can only send and receive, and what its collectives need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_kit.backends.group import tensors as memory
from ddp_kit.backends.group.process_group import PythonProcessGroup, Tensors
from ddp_kit.backends.group.work import PythonWork
from ddp_kit.backends.shm.collectives import Collectives
from ddp_kit.backends.shm.engine import Engine
from ddp_kit.backends.shm.messages import Inboxes, Outbox, Sent
from ddp_kit.backends.shm.operations import Receive, Send, SharedOperation, Steps
from ddp_kit.backends.shm.segment import Segment

NAME = "shm"


class MessageGroup(PythonProcessGroup):
    """A process group over a segment; `SharedMemoryProcessGroup` adds the collectives.

    members: pidfds of the other processes, by rank. timeout: seconds until an operation fails.
    """

    def __init__(self, segment: Segment, members: dict[int, int], timeout: float) -> None:
        super().__init__(NAME, segment.rank, segment.size, timeout)
        self._segment = segment
        self._engine = Engine(segment, Inboxes(segment), members)
        self._steps = Collectives(segment)
        self._outboxes: dict[int, Outbox] = {}

    def shutdown(self) -> None:
        """End what is unfinished; `dist.destroy_process_group` calls this."""
        self._engine.close()

    def abort(self) -> None:
        """Do the same as `shutdown`."""
        self.shutdown()

    def _start(self, name: str, steps: Steps, outputs: Tensors, opts: Any) -> PythonWork:
        operation = SharedOperation(self._engine, name, steps, self._timeout_of(opts), outputs)
        self._engine.start(operation, alone=getattr(opts, "asyncOp", True))
        return PythonWork(operation)

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> PythonWork:
        """Send one tensor."""
        (tensor,) = tensors
        if not 0 <= dstRank < self._size:
            raise ValueError(f"send: there is no rank {dstRank} in a group of {self._size}")
        if dstRank not in self._outboxes:
            self._outboxes[dstRank] = Outbox(self._segment, dstRank)
        outbox, sent = self._outboxes[dstRank], Sent()
        steps = outbox.write(bytes_of(source_of(tensor)), tag, sent)
        writer = SharedOperation(self._engine, "send", steps, self._timeout)
        until = outbox.until_received(sent)
        operation = Send(self._engine, "send", until, self._timeout, tensors)
        self._engine.start_send(operation, writer, dstRank)
        return PythonWork(operation)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> PythonWork:
        """Receive one tensor."""
        if not 0 <= srcRank < self._size:
            raise ValueError(f"recv: there is no rank {srcRank} in a group of {self._size}")
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PythonWork:
        """Receive one tensor from any rank; `Work._source_rank` returns which rank sent it."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> PythonWork:
        (tensor,) = tensors
        buffer = target_of(tensor)

        def finish() -> None:
            memory.copy_back([tensor], [buffer])

        operation = Receive(
            self._engine, bytes_of(buffer), source, tag, self._timeout, finish, tensors
        )
        self._engine.start(operation)
        return PythonWork(operation)


def source_of(tensor: Tensor) -> Tensor:
    """Return memory to read from. Raise RuntimeError for a tensor that is not plain memory."""
    memory.check(NAME, tensor)
    return memory.source_of(tensor)


def target_of(tensor: Tensor) -> Tensor:
    """Return memory to write in. Raise RuntimeError for a tensor that is not plain memory."""
    memory.check(NAME, tensor)
    return memory.target_of(tensor)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a flat one."""
    return tensor.view(-1).view(torch.uint8)
