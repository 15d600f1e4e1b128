"""Records the messages that this process sends. Runs in a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ddp_kit.trace.events import Send


@contextmanager
def recording() -> Iterator[list[Send]]:
    """Collect every point-to-point message that this process sends, in a list.

    `dist.send`, `dist.isend` and `dist.batch_isend_irecv` all end in `ProcessGroup.send`,
    so one wrapper there sees them all, also when they were imported by name.
    """
    sends: list[Send] = []
    original = ProcessGroup.send

    def send(group, tensors, dst, tag=0):
        work = original(group, tensors, dst, tag)
        src, to = _world_rank(group, group.rank()), _world_rank(group, dst)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        sends.append(Send(src, to, tag, nbytes, len(sends)))
        return work

    ProcessGroup.send = send
    try:
        yield sends
    finally:
        ProcessGroup.send = original


def _world_rank(group: ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)
