"""The process group of `shm`: how its operations start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_kit.backends.process_group import PythonProcessGroup, Tensors
from ddp_kit.backends.shm.collectives import SharedMemoryCollectives
from ddp_kit.backends.shm.engine import Engine, Receive, SharedOperation, Steps
from ddp_kit.backends.shm.messages import Inboxes, Outbox
from ddp_kit.backends.shm.segment import Segment
from ddp_kit.backends.work import PythonWork


class SharedMemoryProcessGroup(PythonProcessGroup):
    """A process group whose ranks share memory, on one host.

    Every operation begins in the caller's thread. `Work.wait` moves it on and sleeps while it
    cannot go on; a thread of the group does the same for operations that nobody waits for.
    Collectives of a group run one after another, in the order of the program.

    `send` ends when the message was received, as with gloo. A message that is larger or smaller
    than the receiver's tensor raises an error there. Ranks whose collectives differ in kind, dtype
    or size get an error that names both, unless one of the two is a gather, scatter or all_to_all:
    then they wait for each other.

    After its timeout an operation raises RuntimeError, and also as soon as a process has ended
    without which it cannot go on. After a collective that failed the group cannot be used again.

    `collectives.combine` says in which order sums are added, and `futex` what the order of stores
    relies on. The README has a table of what this backend lacks.

    members: pidfds of the other processes, by rank. timeout: seconds until an operation fails.
    """

    def __init__(self, segment: Segment, members: dict[int, int], timeout: float) -> None:
        collectives = SharedMemoryCollectives(segment)
        super().__init__("shm", segment.rank, segment.size, timeout, collectives)
        self._segment = segment
        self._engine = Engine(segment, Inboxes(segment), members)
        self._outboxes: dict[int, Outbox] = {}

    def shutdown(self) -> None:
        self._engine.close()

    def _start(
        self,
        name: str,
        calls: Sequence[Steps],
        outputs: Tensors,
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> PythonWork:
        def steps() -> Steps:
            for call in calls:
                yield from call
            if finish is not None:
                finish()

        operation = SharedOperation(self._engine, name, steps(), self._timeout_of(opts), outputs)
        self._engine.start_collective(operation, alone=getattr(opts, "asyncOp", True))
        return PythonWork(operation)

    def _send(self, data: Tensor, target: int, tag: int, outputs: Tensors) -> PythonWork:
        if not 0 <= target < self._size:
            raise ValueError(f"send: there is no rank {target} in a group of {self._size}")
        if target not in self._outboxes:
            self._outboxes[target] = Outbox(self._segment, target)
        steps = self._outboxes[target].send(_bytes_of(data), tag)
        operation = SharedOperation(self._engine, "send", steps, self._timeout, outputs)
        self._engine.start_message(operation)
        return PythonWork(operation)

    def _receive(
        self,
        buffer: Tensor,
        source: int | None,
        tag: int,
        outputs: Tensors,
        finish: Callable[[], None],
    ) -> PythonWork:
        if source is not None and not 0 <= source < self._size:
            raise ValueError(f"recv: there is no rank {source} in a group of {self._size}")
        operation = Receive(
            self._engine, _bytes_of(buffer), source, tag, self._timeout, finish, outputs
        )
        self._engine.start_message(operation)
        return PythonWork(operation)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
