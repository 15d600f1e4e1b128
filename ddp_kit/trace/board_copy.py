"""What is on a status board, in numbers: its head, a row for each event, and a copy of it all."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

# What a rank's process is doing: importing torch, serving its pool, forming a process group,
# reading the variables of a worker that raised.
IMPORTING, SERVING, FORMING, RAISED = 0, 1, 2, 3

EVENTS = 1 << 16  # events of a rank that are kept; new ones overwrite the oldest

# Bits of a head: the wait ends by itself after a time; not everything could be counted; the wait is
# a loop that polls; the worker's own thread waits for other threads; the worker has formed a world
# in which this rank has another number than in the pool; a task of a pool has a callback.
LIMITED, CROWDED, POLLED, JOINS, RENUMBERED, TASKS = 1, 2, 4, 8, 16, 32
# Bits of a row: somebody asked whether it is complete, or for its future; the call raised; a
# message whose Work was deleted before anybody had waited for it; another thread than the worker's
# own waits for it, and this wait ends by itself after a time; a callback runs once it is complete,
# or also after a time; the call itself waits.
LOOKED_AFTER, VOID, GIVEN_UP, IN_THREAD, LIMITED_THERE = 1, 2, 4, 8, 16
CALLS_BACK, CALLS_BACK_SOON, BLOCKING = 32, 64, 128

COUNT = struct.Struct("=II")  # how many operations were posted, and how many given up
ROW = struct.Struct("=IIiIqqQQQ")


class Head(NamedTuple):
    """How much of a board is in use, and what its worker is doing."""

    moves: int = 0  # how often anything was written
    bits: int = 0
    waiting: int = -1  # the event that the worker waits for; -1: none
    run: int = 0  # the pool's number of the run
    events: int = 0  # how many there were
    texts: int = 0  # bytes
    counted: int = 0  # channels and groups
    began: int = 0  # nanoseconds of the monotonic clock, when the worker was called
    ended: int = 0  # when it ended; 0: it is still running

    @property
    def waits(self) -> bool:
        """Whether the worker waits for an operation, or for threads of its own."""
        return self.waiting >= 0 or bool(self.bits & JOINS)


class Row(NamedTuple):
    """One event, in numbers. Texts have numbers from 1; 0: there was no room for the text."""

    what: int  # the text of its call
    where: int  # the text of its line of code
    peer: int  # rank in the world; -1: none, or any
    bits: int
    tag: int
    sequence: int
    start: int
    waited: int
    end: int


class BoardCopy(NamedTuple):
    """A copy of what was on a board. `trace.snapshot` makes events of it."""

    head: Head
    counts: bytes
    texts: bytes
    rows: bytes

    def row(self, index: int) -> Row:
        """Return the row of an event that is still kept."""
        return Row(*ROW.unpack_from(self.rows, index % EVENTS * ROW.size))

    def kept(self) -> Iterator[tuple]:
        """Yield the values of all rows that are kept, in no particular order."""
        return ROW.iter_unpack(self.rows)

    def count(self, slot: int) -> tuple[int, int]:
        """Return how many operations were posted, and how many of them were given up."""
        return COUNT.unpack_from(self.counts, slot * COUNT.size)


EMPTY = BoardCopy(Head(), b"", b"", b"")
