"""A process group of PyTorch on a segment of shared memory.

A part of lesson 21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.lessons._shared_segment import (
    ROOM,
    Segment,
    all_gather,
    all_reduce,
    broadcast,
    recv,
    send,
    tell_all,
)

Tensors = Sequence[torch.Tensor]


def tell_by_store(store: dist.Store, where: str | None) -> str:
    """Return on every rank the address that rank 0 passes, through the store of a group."""
    if where is not None:
        store.set("segment", where)
    return store.get("segment").decode()


class Finished(dist.Work):
    """The `Work` of an operation that is over when its call returns."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.future: torch.futures.Future = torch.futures.Future()
        self.future.set_result(list(tensors))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors."""
        return self.future


class Receive(Finished):
    """The `Work` of a receive, which takes its message when somebody waits for it."""

    def __init__(self, tensors: Tensors, take: Callable[[], None]) -> None:
        super().__init__(tensors)
        self.take: Callable[[], None] | None = take

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Take the message, the first time."""
        take, self.take = self.take, None
        if take is not None:
            take()
        return True

    def is_completed(self) -> bool:
        """Return whether the message has been taken."""
        return self.take is None


def pieces(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the parts of contiguous tensors that fit into a slot."""
    for tensor in tensors:
        yield from tensor.detach().view(-1).split(ROOM // tensor.itemsize)


class BareGroup(dist.ProcessGroup):
    """A process group whose ranks are on one host; arguments as `register_backend` passes them."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.name, tell = "", partial(tell_by_store, store)
        self.segment = Segment(rank, size, tell, limit=timeout.total_seconds())

    def getBackendName(self) -> str:
        """Return "segment"."""
        return "segment"

    def setGroupName(self, name: str) -> None:
        """Set PyTorch's name for the group."""
        self.name = name

    def getGroupName(self) -> str:
        """Return PyTorch's name for the group."""
        return self.name

    def shutdown(self) -> None:
        """Give the memory back; `dist.destroy_process_group` calls this."""
        del self.segment


class CollectiveGroup(BareGroup):
    """A group with the collectives that DDP needs."""

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Finished:
        """Sum tensors over all ranks, in place."""
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise ValueError(f"this backend can only sum, got {opts.reduceOp}")
        for piece in pieces(*tensors):
            all_reduce(self.segment, piece)
        return Finished(tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> Finished:
        """Copy tensors of the root to all ranks."""
        for piece in pieces(*tensors):
            broadcast(self.segment, piece, opts.rootRank)
        return Finished(tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Finished:
        """Copy a tensor of every rank to all ranks."""
        for gathered, tensor in zip(outputs, inputs, strict=True):
            for *parts, piece in zip(*map(pieces, gathered), pieces(tensor), strict=True):
                all_gather(self.segment, parts, piece)
        return Finished([tensor for gathered in outputs for tensor in gathered])


class SegmentGroup(CollectiveGroup):
    """A group that has a barrier and sends messages, too.

    They arrive in the order in which they were sent, whatever their tags are.
    """

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Finished:
        """Send a tensor; this returns when it is in the mailbox."""
        send(self.segment, tensors[0].detach().view(-1), dst)
        return Finished(tensors)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Receive:
        """Receive a tensor, when somebody waits for it."""
        return Receive(tensors, partial(recv, self.segment, tensors[0].detach().view(-1), src))

    def barrier(self, opts: Any = None) -> Finished:
        """Wait until all ranks have called this."""
        self.segment.barrier()
        return Finished([])


class ByBroadcast:
    """Stands for a store if ranks have none in common, as under mpiexec."""

    where: str | None = None

    def set(self, key: str, where: str) -> None:
        """Keep the address that rank 0 passes."""
        self.where = where

    def get(self, key: str) -> bytes:
        """Return it on every rank."""
        return tell_all(self.where).encode()


def without_store(store: Any, rank: int, size: int, timeout: timedelta) -> SegmentGroup:
    """Return a group whose ranks tell each other the address through the default group."""
    return SegmentGroup(ByBroadcast(), rank, size, timeout)  # type: ignore[arg-type]
