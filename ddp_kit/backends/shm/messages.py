"""Messages from one rank to one other, with tags: sends, and what is received for whom.

A send is complete when the message was received, as with gloo. In the ring, each message is a
header of 24 bytes, with its tag, its size and its mark, and then the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from ddp_kit.backends.shm.operations import Needs, Receive, Steps
from ddp_kit.backends.shm.rings import MESSAGES, Marks, Ring
from ddp_kit.backends.shm.segment import Segment

_HEADER = 3  # integers of 8 bytes
_BYTES = _HEADER * 8


class Sent:
    """A message on its way. mark: its number, once it is written."""

    mark: int | None = None
    is_received = False


class Outbox:
    """The messages of this rank to one other."""

    def __init__(self, segment: Segment, target: int) -> None:
        self._ring = Ring(segment, segment.rank, target, MESSAGES)
        self._marks = Marks(segment, segment.rank, target)
        self._target = (target,)
        self._sent: list[Sent] = []  # that may have been received

    def write(self, data: torch.Tensor, tag: int, sent: Sent) -> Steps:
        """Write a message into the ring."""
        while (mark := self._marks.take()) is None:
            self._collect()
            if not self._marks.any_free:
                yield self._target
        header = torch.tensor([tag, len(data), mark]).view(torch.uint8)
        for part in (header, data):
            start = 0
            while start < len(part):
                count = self._ring.write(part, start)
                start += count
                if not count:
                    yield self._target
        sent.mark = mark
        self._sent.append(sent)

    def until_received(self, sent: Sent) -> Steps:
        """Wait until a message was received."""
        while not sent.is_received:
            self._collect()
            if not sent.is_received:
                yield self._target

    def _collect(self) -> None:
        """Note what was received."""
        for sent in self._sent:
            assert sent.mark is not None, "it was written"
            sent.is_received = self._marks.is_set(sent.mark)
        self._sent = [sent for sent in self._sent if not sent.is_received]


class _Message:
    """A message that arrives, for a receive or, if there is none yet, for later."""

    def __init__(self, tag: int, nbytes: int, mark: int) -> None:
        self.tag, self.nbytes, self.mark = tag, nbytes, mark
        self.done = 0  # bytes that have arrived
        self.receive: Receive | None = None
        self.memory: torch.Tensor | None = None

    def begin(self, receive: Receive | None) -> None:
        fits = receive is not None and len(receive.buffer) == self.nbytes
        self.receive = receive
        self.memory = (
            receive.buffer if receive and fits else torch.empty(self.nbytes, dtype=torch.uint8)
        )


class Inboxes:
    """What arrives from every rank, and the receives that wait for it, in their order."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        ranks = range(segment.size)
        self._rings = [Ring(segment, rank, segment.rank, MESSAGES) for rank in ranks]
        self._marks = [Marks(segment, rank, segment.rank) for rank in ranks]
        self._arriving: list[_Message | None] = [None for _ in ranks]
        self._kept: list[list[_Message]] = [[] for _ in ranks]  # that came before their receives
        self._posted: list[Receive] = []

    def post(self, receive: Receive) -> None:
        """Wait for a message."""
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
                    kept.receive = receive
                    yield self._finish(rank, kept)
        for rank in range(self._segment.size):
            while self._arriving[rank] is not None or self._is_wanted(rank):
                message = self._take(rank)
                if message is None:
                    break
                if message.receive is None:
                    self._kept[rank].append(message)
                else:
                    yield self._finish(rank, message)

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

    def _take(self, rank: int) -> _Message | None:
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
            message = self._arriving[rank] = _Message(tag, nbytes, mark)
            message.begin(self._match(rank, tag))
        elif message.receive is None:
            message.receive = self._match(rank, message.tag)
        assert message.memory is not None, "begin has set it"
        while message.done < message.nbytes:
            count = ring.read(message.memory, message.done)
            if not count:
                return None
            message.done += count
        self._arriving[rank] = None
        return message

    def _finish(self, rank: int, message: _Message) -> Receive:
        """Give a complete message to its receive, which may have failed meanwhile."""
        receive, memory = message.receive, message.memory
        assert receive is not None, "the caller has found one"
        assert memory is not None, "begin has set it"
        receive.source = rank
        if len(receive.buffer) != message.nbytes:
            receive.error = receive.error or RuntimeError(
                f"recv got {message.nbytes} bytes from rank {rank}, "
                f"but the tensor has {len(receive.buffer)}"
            )
        else:
            if memory is not receive.buffer:
                receive.buffer.copy_(memory)
            receive.finish()
        self._marks[rank].set(message.mark)
        return receive
