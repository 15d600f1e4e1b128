"""The shared memory of one group: an anonymous file that every rank maps.

For each of n ranks there are, in this order:

    a bell, a word that changes whenever the rank has written anything; and its counters
    for each other rank: the counters of two rings, and a mark for each message under way
    two slots: what the rank gives to all, written once and read by everybody
    for each other rank two rings: what the rank gives to that one alone

The file is as large as all that together, but the system provides only the pages that are used. It
has no name, and ends with the last process that maps it, however that process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import torch

from ddp_kit.backends.shm import futex

PAGE = 4096
SLOTS = 2  # of each rank; one may be written while the other is still being read
SLOT = 1 << 22  # bytes
RING = 1 << 19  # bytes
_PIECE = RING // 4  # bytes of a ring after which the other side may already go on
_VIEWS = 1024  # tensors over slots that are kept, because making them takes longer than a copy
MARKS = 48  # messages from one rank to another that may be under way at once
LINE = 128  # bytes: two cache lines, because a processor may fetch the neighbour too
_COUNTERS = 4 * LINE  # bytes of the counters of two rings
_PAIR = _COUNTERS + MARKS * 8  # bytes of the words of one rank for one other

# Words of 8 bytes in the line of a rank, of which the first belongs to the bell.
WRITTEN, READ, PID = 1, 2, 3


class Segment:
    """The memory of a group of `size` ranks, as `rank` sees it. descriptor: of the file."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._pairs, self._slots, self._rings, nbytes = _layout(size)
        self._map = mmap.mmap(descriptor, nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = memoryview(self._map).cast("Q")
        # A rank's bell and counters, by rank.
        bells = memoryview(self._map)[: size * LINE].cast("I")
        self.bells = bells[:: LINE // 4]
        self.addresses = [ctypes.c_void_p(start + LINE * r) for r in range(size)]
        self.lines = [LINE * r // 8 for r in range(size)]
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype, int | None], torch.Tensor] = {}

    def announce(self) -> None:
        """Let the others see what this rank has written, and wake those that sleep until then."""
        futex.advance(self.addresses[self.rank])

    def header(self, rank: int, slot: int) -> int:
        """Return the index of the first word of a slot's own page."""
        return (self._slots + (rank * SLOTS + slot) * (PAGE + SLOT)) // 8

    def slot(
        self, rank: int, slot: int, dtype: torch.dtype, count: int | None = None
    ) -> torch.Tensor:
        """Return the memory of a slot, as a flat tensor of `count` elements; None: all of it."""
        key = rank, slot, dtype, count
        if key not in self._views:
            start = self.header(rank, slot) * 8 + PAGE
            if len(self._views) == _VIEWS:
                self._views.clear()
            self._views[key] = self._bytes[start : start + SLOT].view(dtype)[:count]
        return self._views[key]

    def counters(self, source: int, target: int) -> int:
        """Return the index of the first word of what one rank shares with one other."""
        return (self._pairs + (source * self.size + target) * _PAIR) // 8

    def marks(self, source: int, target: int) -> int:
        """Return the index of the first mark of the messages from one rank to one other."""
        return self.counters(source, target) + _COUNTERS // 8

    def ring(self, source: int, target: int, number: int) -> torch.Tensor:
        """Return the memory of one of the two rings from a rank to another."""
        start = self._rings + ((source * self.size + target) * 2 + number) * RING
        return self._bytes[start : start + RING]


class Ring:
    """A stream of bytes from `source` to `target`, of which this process is one.

    A pair has two, so that messages do not wait for collectives. Only the source writes `written`,
    and only the target `read`; both count bytes from the start of the group.
    """

    def __init__(self, segment: Segment, source: int, target: int, for_messages: bool) -> None:
        self._segment, self._words = segment, segment.words
        number = 0 if for_messages else 1
        self._written = segment.counters(source, target) + number * 2 * LINE // 8
        self._read = self._written + LINE // 8
        self._memory = segment.ring(source, target, number)

    @property
    def available(self) -> int:
        return self._words[self._written] - self._words[self._read]

    def write(self, data: torch.Tensor, start: int) -> int:
        """Write bytes of a flat tensor from `start` on; return how many found room."""
        written = self._words[self._written]
        room = RING - (written - self._words[self._read])
        count = min(room, len(data) - start, RING - written % RING, _PIECE)
        if count > 0:
            at = written % RING
            self._memory[at : at + count].copy_(data[start : start + count])
            futex.fence()
            self._words[self._written] = written + count
            self._segment.announce()
        return count

    def write_all(self, data: torch.Tensor) -> Iterator[None]:
        """Write all bytes of a flat tensor; yield while there is no room."""
        start = 0
        while start < len(data):
            count = self.write(data, start)
            start += count
            if not count:
                yield

    def read(self, data: torch.Tensor, start: int) -> int:
        """Read bytes into a flat tensor from `start` on; return how many were there."""
        read = self._words[self._read]
        there = self._words[self._written] - read
        count = min(there, len(data) - start, RING - read % RING, _PIECE)
        if count > 0:
            futex.fence()
            at = read % RING
            data[start : start + count].copy_(self._memory[at : at + count])
            futex.fence()
            self._words[self._read] = read + count
            self._segment.announce()
        return count

    def read_all(self, data: torch.Tensor) -> Iterator[None]:
        """Read bytes until a flat tensor is full; yield while there are none."""
        start = 0
        while start < len(data):
            count = self.read(data, start)
            start += count
            if not count:
                yield


def _layout(size: int) -> tuple[int, int, int, int]:
    """Return where the pairs, slots and rings of so many ranks begin, and where the file ends."""

    def pages(nbytes: int) -> int:
        return -(-nbytes // PAGE) * PAGE

    pairs = pages(size * LINE)
    slots = pairs + pages(size * size * _PAIR)
    rings = slots + size * SLOTS * (PAGE + SLOT)
    return pairs, slots, rings, rings + size * size * 2 * RING


def bytes_for(size: int) -> int:
    """Return the size of the file for so many ranks, of which most is never used."""
    return _layout(size)[-1]


def create(size: int) -> int:
    """Create the file of a group of so many ranks; return its descriptor."""
    descriptor = os.memfd_create("ddp_kit shm")
    os.ftruncate(descriptor, bytes_for(size))
    return descriptor
