"""The shared memory of one group: an anonymous file that every rank maps.

For each of n ranks there are, in this order:

    a bell, a word that changes whenever the rank has written anything; and its counters
    for each other rank: the counters of a ring
    two slots: what the rank gives to all, written once and read by everybody
    for each other rank a ring: what the rank gives to that one alone

The file is as large as all that together, but the system provides only the pages that are used. It
has no name, and ends with the last process that maps it, however that process ends.

A rank sleeps until another one changes its bell: with Linux's futex, through ctypes.
Which store does another core see first? Python has no word for that. This package relies on this:

* A rank writes data, then a counter that says how much, and then calls `_advance` on its bell. A
  reader looks at the bell, then at the counter, then at the data, and sleeps while the bell is what
  it was. `_advance` is one system call, FUTEX_WAKE_OP, in which the kernel adds 1 with an atomic
  instruction: a full barrier on every processor, so nobody sleeps past what came before it.
* Between data and counter, a writer and a reader call `fence`. On x86 that does nothing, because
  x86 shows no other core two stores, and does no two loads, in another order than the program's
  (total store order). The C library may copy much data with stores that x86 does not keep in
  order; it ends such a copy with a barrier of its own.
* ARM and others may reorder both. There `fence` is the same system call, on a word of its own.
  Nobody has run this on ARM yet.
* `memoryview` reads and writes a word of 4 or 8 bytes, at a multiple of its size, with one
  instruction, so nobody sees half of it. No word has two writers at a time.

https://man7.org/linux/man-pages/man2/futex.2.html
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator

import torch

PAGE = 4096
SLOTS = 2  # of each rank; one may be written while the other is still being read
SLOT = 1 << 22  # bytes
RING = 1 << 19  # bytes
_PIECE = RING // 4  # bytes of a ring after which the other side may already go on
_SHORT = 0.0005  # seconds of a sleep where several bells are to be heard
# Seconds to look at a bell before sleeping, if every rank has a core. With a twentieth of it, the
# slowest tenth of the all_reduces of 1 MB took twice as long, because waking a thread takes time.
_SPIN = 0.001
LINE = 128  # bytes: two cache lines, because a processor may fetch the neighbour too
_PAIR = 2 * LINE  # bytes of the counters of a ring

# Words of 8 bytes in the line of a rank, of which the first belongs to the bell.
WRITTEN, READ, ENTERED = 1, 2, 3


class Segment:
    """The memory of a group of `size` ranks, as `rank` sees it. descriptor: of the file."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._pairs, self._slots, self._rings, nbytes = _layout(size)
        self._map = mmap.mmap(descriptor, nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = memoryview(self._map).cast("Q")
        # A rank's bell and counters, by rank.
        self._bells = memoryview(self._map)[: size * LINE].cast("I")[:: LINE // 4]
        self._addresses = [ctypes.c_void_p(start + LINE * rank) for rank in range(size)]
        self.lines = [LINE * rank // 8 for rank in range(size)]
        self.announced = 0  # how often this rank has rung its bell
        self._spins = size <= len(os.sched_getaffinity(0))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def look(self) -> list[int]:
        return self._bells.tolist()

    def announce(self) -> None:
        """Let the others see what this rank has written, and wake those that sleep until then."""
        self.announced += 1
        _advance(self._addresses[self.rank])

    def sleep(
        self, seen: list[int], needs: Collection[int], seconds: float, waited: float = 0.0
    ) -> None:
        """Sleep until the bell of a rank is no longer what was seen, a signal comes, or time is up.

        needs: the ranks. If there are several, it sleeps for a moment only, because a futex is one
        word.
        """
        rank = min(needs, default=self.rank)
        last, ends = seen[rank], time.perf_counter() + _SPIN
        while self._spins and len(needs) == 1 and time.perf_counter() < ends:
            for _ in range(16):
                if self._bells[rank] != last:
                    return
            time.sleep(0)  # lets another thread have the GIL
        seconds = seconds if len(needs) == 1 else min(seconds, _SHORT)
        limit = ctypes.byref(_Time(int(seconds), int(seconds % 1 * 1e9)))
        _syscall(_FUTEX, self._addresses[rank], _WAIT, ctypes.c_uint(last), limit, None, 0)

    def header(self, rank: int, slot: int) -> int:
        """Return the index of the first word of a slot's own page."""
        return (self._slots + (rank * SLOTS + slot) * (PAGE + SLOT)) // 8

    def slot(self, rank: int, slot: int, dtype: torch.dtype) -> torch.Tensor:
        start = self.header(rank, slot) * 8 + PAGE
        return self._bytes[start : start + SLOT].view(dtype)

    def counters(self, source: int, target: int) -> int:
        """Return the index of the first word of what one rank shares with one other."""
        return (self._pairs + (source * self.size + target) * _PAIR) // 8

    def ring(self, source: int, target: int) -> torch.Tensor:
        """Return the memory of the ring from a rank to another."""
        start = self._rings + (source * self.size + target) * RING
        return self._bytes[start : start + RING]


class Ring:
    """A stream of bytes from `source` to `target`, of which this process is one.

    Only the source writes `written`, and only the target `read`; both count bytes from the start of
    the group.
    """

    def __init__(self, segment: Segment, source: int, target: int) -> None:
        self._segment, self._words = segment, segment.words
        self._written = segment.counters(source, target)
        self._read = self._written + LINE // 8
        self._memory = segment.ring(source, target)

    @property
    def written(self) -> int:
        return self._words[self._written]

    @property
    def read_to(self) -> int:
        return self._words[self._read]

    def write(self, data: torch.Tensor, start: int) -> int:
        """Write bytes of a flat tensor from `start` on; return how many found room."""
        written = self._words[self._written]
        room = RING - (written - self._words[self._read])
        count = min(room, len(data) - start, RING - written % RING, _PIECE)
        if count > 0:
            at = written % RING
            self._memory[at : at + count].copy_(data[start : start + count])
            fence()
            self._words[self._written] = written + count
            self._segment.announce()
        return count

    def write_all(self, data: torch.Tensor) -> Iterator[None]:
        """Write all bytes of a flat tensor; yield while there is no room."""
        return _all(self.write, data)

    def read(self, data: torch.Tensor, start: int) -> int:
        """Read bytes into a flat tensor from `start` on; return how many were there."""
        read = self._words[self._read]
        there = self._words[self._written] - read
        count = min(there, len(data) - start, RING - read % RING, _PIECE)
        if count > 0:
            fence()
            at = read % RING
            data[start : start + count].copy_(self._memory[at : at + count])
            fence()
            self._words[self._read] = read + count
            self._segment.announce()
        return count

    def read_all(self, data: torch.Tensor) -> Iterator[None]:
        """Read bytes until a flat tensor is full; yield while there are none."""
        return _all(self.read, data)


def _all(move: Callable[[torch.Tensor, int], int], data: torch.Tensor) -> Iterator[None]:
    start = 0
    while start < len(data):
        count = move(data, start)
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
    return pairs, slots, rings, rings + size * size * RING


def bytes_for(size: int) -> int:
    """Return the size of the file for so many ranks, of which most is never used."""
    return _layout(size)[-1]


def create(size: int) -> int:
    descriptor = os.memfd_create("ddp_kit shm")
    os.ftruncate(descriptor, bytes_for(size))
    return descriptor


# Sleeping until a word changes

_MACHINE = platform.machine()
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX = _NUMBERS.get(_MACHINE)
_WAIT, _WAKE_OP = 0, 5
_ADD_1 = 1 << 28 | 1 << 12 | 0xFFF  # add 1; and wake nobody on the second word: it is never -1
_EVERYBODY = 0x7FFFFFFF

is_supported = sys.platform == "linux" and _FUTEX is not None

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _advance(address: ctypes.c_void_p) -> None:
    """Add 1 to the word of 4 bytes at an address, and wake all who sleep until it changes."""
    _syscall(_FUTEX, address, _WAKE_OP, _EVERYBODY, None, address, _ADD_1)


_own = ctypes.c_uint32()
_own_address = ctypes.c_void_p(ctypes.addressof(_own))


def fence() -> None:
    """Let what comes after this call happen after what came before it; x86 does that anyway."""
    if _MACHINE != "x86_64":
        _advance(_own_address)
