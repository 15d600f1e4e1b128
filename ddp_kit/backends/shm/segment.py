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

import torch

from ddp_kit.backends.shm import futex

PAGE = 4096
SLOTS = 2  # of each rank; one may be written while the other is still being read
SLOT = 1 << 22  # bytes
RING = 1 << 19  # bytes
_VIEWS = 1024  # tensors over slots that are kept, because making them takes longer than a copy
MARKS = 48  # messages from one rank to another that may be under way at once
NONCE = 16  # bytes at the start that tell this file from any other
LINE = 128  # bytes: two cache lines, because a processor may fetch the neighbour too
_PAIR = 512 + MARKS * 8  # bytes of the words of one rank for one other

# Words of 8 bytes in the line of a rank, of which the first belongs to the bell.
WRITTEN, READ, PID = 1, 2, 3


class Segment:
    """The memory of a group of `size` ranks, as `rank` sees it. descriptor: of the file."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._pairs = PAGE + -(-size * LINE // PAGE) * PAGE
        self._slots = self._pairs + -(-size * size * _PAIR // PAGE) * PAGE
        self._rings = self._slots + size * SLOTS * (PAGE + SLOT)
        self._map = mmap.mmap(descriptor, bytes_for(size))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = memoryview(self._map).cast("Q")
        # A rank's bell and counters, by rank.
        bells = memoryview(self._map)[PAGE : PAGE + size * LINE].cast("I")
        self.bells = bells[:: LINE // 4]
        self.addresses = [ctypes.c_void_p(start + PAGE + LINE * r) for r in range(size)]
        self.lines = [(PAGE + LINE * r) // 8 for r in range(size)]
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype, int | None], torch.Tensor] = {}

    @property
    def nonce(self) -> bytes:
        """The bytes that tell this file from any other."""
        return self._map[:NONCE]

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

    def pair(self, source: int, target: int) -> int:
        """Return the index of the first word of what one rank shares with one other."""
        return (self._pairs + (source * self.size + target) * _PAIR) // 8

    def ring(self, source: int, target: int, number: int) -> torch.Tensor:
        """Return the memory of one of the two rings from a rank to another."""
        start = self._rings + ((source * self.size + target) * 2 + number) * RING
        return self._bytes[start : start + RING]


def bytes_for(size: int) -> int:
    """Return the size of the file for so many ranks, of which most is never used."""
    pages = 1 + -(-size * LINE // PAGE) + -(-size * size * _PAIR // PAGE)
    return pages * PAGE + size * SLOTS * (PAGE + SLOT) + size * size * 2 * RING


def create(size: int) -> int:
    """Create the file of a group of so many ranks; return its descriptor."""
    descriptor = os.memfd_create("ddp_kit shm")
    os.ftruncate(descriptor, bytes_for(size))
    os.pwrite(descriptor, os.urandom(NONCE), 0)
    return descriptor
