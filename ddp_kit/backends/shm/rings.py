"""Streams of bytes from one rank to one other, through a ring of shared memory."""

from __future__ import annotations

import torch

from ddp_kit.backends.shm import futex
from ddp_kit.backends.shm.segment import MARKS, RING, Segment

_PIECE = RING // 4  # bytes after which the other side may already go on
MESSAGES, COLLECTIVES = range(2)  # the two rings of a pair
_FIRST_MARK = 64  # in the words of a pair, after the lines of four counters


class Ring:
    """One of the two rings from `source` to `target`, of which this process is one.

    Only the source writes `written`, and only the target `read`; both count bytes from the start
    of the group.
    """

    def __init__(self, segment: Segment, source: int, target: int, number: int) -> None:
        self._segment, self._words = segment, segment.words
        self._written = segment.pair(source, target) + number * 32
        self._read = self._written + 16
        self._memory: torch.Tensor | None = None  # not before it is used
        self._place = source, target, number

    @property
    def available(self) -> int:
        """The number of bytes that can be read now."""
        return self._words[self._written] - self._words[self._read]

    def write(self, data: torch.Tensor, start: int) -> int:
        """Write bytes of a flat tensor from `start` on; return how many found room."""
        written = self._words[self._written]
        room = RING - (written - self._words[self._read])
        count = min(room, len(data) - start, RING - written % RING, _PIECE)
        if count > 0:
            at = written % RING
            self.memory[at : at + count].copy_(data[start : start + count])
            futex.fence()
            self._words[self._written] = written + count
            self._segment.announce()
        return count

    def read(self, data: torch.Tensor, start: int) -> int:
        """Read bytes into a flat tensor from `start` on; return how many were there."""
        read = self._words[self._read]
        there = self._words[self._written] - read
        count = min(there, len(data) - start, RING - read % RING, _PIECE)
        if count > 0:
            futex.fence()
            at = read % RING
            data[start : start + count].copy_(self.memory[at : at + count])
            futex.fence()
            self._words[self._read] = read + count
            self._segment.announce()
        return count

    @property
    def memory(self) -> torch.Tensor:
        """The ring's bytes."""
        if self._memory is None:
            self._memory = self._segment.ring(*self._place)
        return self._memory


class Marks:
    """A word for each message on its way from `source` to `target`: whether it was received.

    The source sets a mark to 0 before it sends the mark's number, and the target sets it to 1.
    """

    def __init__(self, segment: Segment, source: int, target: int) -> None:
        self._segment = segment
        self._first = segment.pair(source, target) + _FIRST_MARK
        self._free = list(range(MARKS))

    @property
    def any_free(self) -> bool:
        """Whether `take` returns one."""
        return bool(self._free)

    def take(self) -> int | None:
        """Return a free mark, set to 0; None: all are in use."""
        if not self._free:
            return None
        mark = self._free.pop()
        self._segment.words[self._first + mark] = 0
        return mark

    def is_set(self, mark: int) -> bool:
        """Return whether the target has received the message, and free the mark if it has."""
        if not self._segment.words[self._first + mark]:
            return False
        self._free.append(mark)
        return True

    def set(self, mark: int) -> None:
        """Tell the source that its message was received."""
        self._segment.words[self._first + mark] = 1
        self._segment.announce()
