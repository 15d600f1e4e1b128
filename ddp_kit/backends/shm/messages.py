"""Messages from one rank to one other, with tags.

In the ring, each message is a header of 24 bytes, with its tag, its size and the number of its
mark, and then the bytes. A mark is a word that says whether the message was received: the sender
sets it to 0 before it writes the message, and the receiver sets it to 1.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ddp_kit.backends.engine import PythonWork, Steps
from ddp_kit.backends.shm.segment import MARKS, Ring, Segment

_HEADER = 3  # integers of 8 bytes


class Outbox:
    """The messages of this rank to one other."""

    def __init__(self, segment: Segment, target: int) -> None:
        self._segment, self._needs = segment, (target,)
        self._ring = Ring(segment, segment.rank, target, for_messages=True)
        self._first_mark = segment.marks(segment.rank, target)
        self._free_marks = list(range(MARKS))
        self._is_writing = False

    def send(self, data: torch.Tensor, tag: int) -> Steps:
        """Write a message into the ring, and wait until it was received, as with gloo.

        The engine moves sends on in the order in which they were started, so they are written in
        that order, too.
        """
        while self._is_writing or not self._free_marks:
            yield self._needs
        self._is_writing = True
        mark = self._free_marks.pop()
        words, at = self._segment.words, self._first_mark + mark
        words[at] = 0
        header = torch.tensor([tag, len(data), mark]).view(torch.uint8)
        for part in (header, data):
            for _ in self._ring.write_all(part):
                yield self._needs
        self._is_writing = False
        while not words[at]:
            yield self._needs
        self._free_marks.append(mark)


class _Message:
    """A message that arrives from a rank. memory: where its bytes go; done: how many have come."""

    def __init__(self, source: int, tag: int, nbytes: int, mark: int) -> None:
        self.source, self.tag, self.nbytes, self.mark = source, tag, nbytes, mark
        self.memory: torch.Tensor | None = None
        self.done = 0

    @property
    def is_complete(self) -> bool:
        return self.done == self.nbytes


class _Receive:
    """A receive. sources: the ranks from which it takes a message."""

    def __init__(
        self, work: PythonWork, buffer: torch.Tensor, sources: Collection[int], tag: int
    ) -> None:
        self.work, self.buffer, self.sources, self.tag = work, buffer, sources, tag
        self.message: _Message | None = None

    def takes(self, message: _Message) -> bool:
        is_for_it = message.tag == self.tag and message.source in self.sources
        return is_for_it and not self.work.done  # it may have timed out


class Inboxes:
    """What arrives from every rank, and the receives that wait for it, in their order."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        ranks = range(segment.size)
        self._rings = [Ring(segment, rank, segment.rank, for_messages=True) for rank in ranks]
        self._arriving: list[_Message | None] = [None for _ in ranks]
        self._early: list[_Message] = []  # those that came before their receives
        self._posted: list[_Receive] = []

    def receive(
        self, work: PythonWork, buffer: torch.Tensor, source: int | None, tag: int
    ) -> Steps:
        """Fill a buffer with a message of a rank; None: of any."""
        sources = range(self._segment.size) if source is None else (source,)
        receive = _Receive(work, buffer, sources, tag)
        receive.message = next(filter(receive.takes, self._early), None)
        if receive.message is None:
            self._posted.append(receive)
        else:
            self._early.remove(receive.message)
        while receive.message is None or not receive.message.is_complete:
            if receive.message is None and work.done:
                self._posted.remove(receive)
                return
            ranks = sources if receive.message is None else (receive.message.source,)
            if not any(map(self._read_on, ranks)):
                yield ranks
        self._take(receive, receive.message)

    def _read_on(self, rank: int) -> bool:
        """Read on in the message of a rank, or in its next one; return whether it is complete."""
        ring = self._rings[rank]
        message = self._arriving[rank]
        if message is None:
            if ring.available < _HEADER * 8:
                return False
            header = torch.empty(_HEADER, dtype=torch.int64)
            for _ in ring.read_all(header.view(torch.uint8)):
                pass  # it is all there
            message = self._arriving[rank] = _Message(rank, *header.tolist())
            self._find_receive(message)
        while not message.is_complete:
            count = ring.read(message.memory, message.done)
            if not count:
                return False
            message.done += count
        self._arriving[rank] = None
        return True

    def _find_receive(self, message: _Message) -> None:
        """Give a message to the first receive that takes it, which waits for no other one then."""
        for receive in self._posted:
            if receive.takes(message):
                self._posted.remove(receive)
                receive.message = message
                if len(receive.buffer) == message.nbytes:
                    message.memory = receive.buffer
                    return
                break
        else:
            self._early.append(message)
        message.memory = torch.empty(message.nbytes, dtype=torch.uint8)

    def _take(self, receive: _Receive, message: _Message) -> None:
        """Copy a complete message, and tell its sender. Raise RuntimeError if it does not fit."""
        fits = len(receive.buffer) == message.nbytes
        if fits and message.memory is not receive.buffer:
            receive.buffer.copy_(message.memory)
        receive.work.source = message.source
        self._segment.words[
            self._segment.marks(message.source, self._segment.rank) + message.mark
        ] = 1
        self._segment.announce()
        if not fits:
            raise RuntimeError(
                f"recv got {message.nbytes} bytes from rank {message.source}, "
                f"but the tensor has {len(receive.buffer)}"
            )
