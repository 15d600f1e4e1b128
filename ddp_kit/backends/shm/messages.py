"""Messages from one rank to one other, with tags.

In the ring, each message is a header of 24 bytes, with its tag, its size and the number of its
mark, and then the bytes. A mark is a word that says whether the message was received: the sender
sets it to 0 before it writes the message, and the receiver sets it to 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from ddp_kit.backends.shm.engine import Needs, Receive, Steps
from ddp_kit.backends.shm.segment import MARKS, Ring, Segment

_HEADER = 3  # integers of 8 bytes
_BYTES = _HEADER * 8


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
    """A message that arrives, for a receive or, if there is none yet, for later."""

    def __init__(self, tag: int, nbytes: int, mark: int, receive: Receive | None) -> None:
        self.tag, self.nbytes, self.mark, self.receive = tag, nbytes, mark, receive
        self.done = 0  # bytes that have arrived
        fits = receive is not None and len(receive.buffer) == nbytes
        self.memory = receive.buffer if fits else torch.empty(nbytes, dtype=torch.uint8)


class Inboxes:
    """What arrives from every rank, and the receives that wait for it, in their order."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        ranks = range(segment.size)
        self._rings = [Ring(segment, rank, segment.rank, for_messages=True) for rank in ranks]
        self._arriving: list[_Message | None] = [None for _ in ranks]
        self._kept: list[list[_Message]] = [[] for _ in ranks]  # that came before their receives
        self._posted: list[Receive] = []

    def post(self, receive: Receive) -> None:
        self._posted.append(receive)

    def withdraw(self, receive: Receive) -> None:
        """Wait no longer, unless the message has begun to arrive."""
        if receive in self._posted:
            self._posted.remove(receive)

    def needs(self, receive: Receive) -> Needs:
        """Return the ranks that may bring a receive on."""
        for rank, message in enumerate(self._arriving):
            if message is not None and message.receive is receive:
                return (rank,)
        return frozenset(self._sources(receive))

    def advance(self) -> Iterator[Receive]:
        """Receive what is there; yield each receive that is over."""
        if not self._posted and not any(self._arriving):
            return
        for receive in list(self._posted):
            for rank in self._sources(receive):
                kept = next((m for m in self._kept[rank] if m.tag == receive.tag), None)
                if kept is not None and receive in self._posted:
                    self._kept[rank].remove(kept)
                    self._posted.remove(receive)
                    yield self._finish(rank, kept, receive)
        for rank in range(self._segment.size):
            while self._arriving[rank] is not None or self._is_wanted(rank):
                message = self._read_on(rank)
                if message is None:
                    break
                if message.receive is None:
                    self._kept[rank].append(message)
                else:
                    yield self._finish(rank, message, message.receive)

    def _sources(self, receive: Receive) -> Collection[int]:
        return range(self._segment.size) if receive.wanted is None else (receive.wanted,)

    def _is_wanted(self, rank: int) -> bool:
        """Return whether a message of a rank is there, and a receive that may be for it."""
        return any(r.wanted in (None, rank) for r in self._posted) and bool(
            self._rings[rank].available
        )

    def _match(self, rank: int, tag: int) -> Receive | None:
        """Return the first receive for a message, which waits for no other one from now on."""
        for receive in self._posted:
            if receive.tag == tag and receive.wanted in (None, rank):
                self._posted.remove(receive)
                return receive
        return None

    def _read_on(self, rank: int) -> _Message | None:
        """Read on in the message of a rank; return it when it is complete."""
        ring = self._rings[rank]
        message = self._arriving[rank]
        if message is None:
            if ring.available < _BYTES:
                return None
            header = torch.empty(_HEADER, dtype=torch.int64)
            data, start = header.view(torch.uint8), 0
            while start < _BYTES:
                start += ring.read(data, start)
            tag, nbytes, mark = header.tolist()
            message = _Message(tag, nbytes, mark, self._match(rank, tag))
            self._arriving[rank] = message
        elif message.receive is None:
            message.receive = self._match(rank, message.tag)
        while message.done < message.nbytes:
            count = ring.read(message.memory, message.done)
            if not count:
                return None
            message.done += count
        self._arriving[rank] = None
        return message

    def _finish(self, rank: int, message: _Message, receive: Receive) -> Receive:
        """Give a complete message to its receive, which may have failed meanwhile."""
        receive.source = rank
        if len(receive.buffer) != message.nbytes:
            receive.error = receive.error or RuntimeError(
                f"recv got {message.nbytes} bytes from rank {rank}, "
                f"but the tensor has {len(receive.buffer)}"
            )
        else:
            if message.memory is not receive.buffer:
                receive.buffer.copy_(message.memory)
            receive.finish()
        self._segment.words[self._segment.marks(rank, self._segment.rank) + message.mark] = 1
        self._segment.announce()
        return receive
