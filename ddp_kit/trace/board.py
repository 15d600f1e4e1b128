"""The status board: what a rank has called and what it waits in, readable while it is stuck.

A rank that waits in native code cannot answer. So before each call it writes what it is about to
do into memory that the pool's process maps too. The memory is an anonymous file, which is gone
when both processes are.

    head      which run, how many events, which one is waited for
    phase     what the process is doing apart from that
    progress  how far a loop of the worker has come, how many steps it has, and its label
    handled   which exception the worker is handling while it waits
    counts    of each channel and each group: how many operations were posted, how many given up
    texts     what events have in common, one JSON line each: channels, calls, lines of code
    events    the newest ones, in a ring
    stacks    which lines its threads run, written when the pool asks

The head is written last: a reader who finds the same head before and after has read a consistent
board.
"""

from __future__ import annotations

import json
import mmap
import operator
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import reduction
from typing import Any, BinaryIO, NamedTuple

from ddp_kit import settings
from ddp_kit.trace import stacks

# What a rank's process is doing: importing torch, serving its pool, forming a process group.
IMPORTING, SERVING, FORMING = 0, 1, 2

COUNTED = settings.EVENTS_KEPT  # channels and groups of a rank that can be counted
TEXTS = 1 << 22  # bytes

# The numbers of the head, of a row and of a count take 8 bytes each, so that one can be written
# without the others. These are their places in a Head and in a Row.
_NUMBER, _OF_ROW = 8, 9  # bytes of a number, numbers of a row
_MOVES, _BITS, _WAITING, _EVENTS, _TEXTS = 0, 1, 2, 4, 5
_ROW_PEER, _ROW_BITS, _ROW_SEQUENCE, _ROW_WAITED, _ROW_END = 2, 3, 5, 7, 8
_HEAD, _ROW, _COUNT = struct.Struct("=9q"), struct.Struct("=9q"), struct.Struct("=2q")

_PROGRESS, _LABEL = struct.Struct("=QQ"), struct.Struct("=256s")  # numbers plus one; 0: none
_PHASE_AT, _PROGRESS_AT = 1023, 1024
_HANDLED_AT = _PROGRESS_AT + _PROGRESS.size
_LABEL_AT, _COUNTS_AT = 512, 4096
_TEXTS_AT = _COUNTS_AT + COUNTED * _COUNT.size
_ROWS_AT = _TEXTS_AT + TEXTS
_COUNTS, _ROWS = _COUNTS_AT // _NUMBER, _ROWS_AT // _NUMBER
_STACKS_AT = _ROWS_AT + settings.EVENTS_KEPT * _ROW.size
_SIZE = _STACKS_AT + (1 << 22)  # what nobody has written takes no memory


class HeadBits:
    """What holds for a rank at this moment. Plain numbers: operators of an IntFlag are slow."""

    LIMITED = 1  # The worker's wait ends by itself after a time.
    CROWDED = 2  # Not everything could be counted.
    POLLED = 4  # The worker's wait is a loop that polls.
    JOINS = 8  # The worker's own thread waits for other threads.
    RENUMBERED = 16  # In its world, this rank has another number than in the pool.
    TASKS = 32  # A task of a thread pool has a callback.


class RowBits:
    """What holds for one event."""

    LOOKED_AFTER = 1  # Somebody asked whether it is complete, or for its future.
    VOID = 2  # The call raised.
    GIVEN_UP = 4  # A message whose Work was deleted before anybody had waited for it.
    IN_THREAD = 8  # Another thread than the worker's own waits for it.
    LIMITED_THERE = 16  # That wait ends by itself after a time.
    CALLS_BACK = 32  # A callback runs once it is complete.
    CALLS_BACK_SOON = 64  # That callback runs after a time even if it is not complete.
    BLOCKING = 128  # The call itself waits, and returns no Work or future to wait for.


_NOT_OF_WAITS = HeadBits.CROWDED | HeadBits.RENUMBERED | HeadBits.TASKS


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
        return self.waiting >= 0 or self.has(HeadBits.JOINS)

    def has(self, bit: int) -> bool:
        return bool(self.bits & bit)


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

    def has(self, bit: int) -> bool:
        return bool(self.bits & bit)


class BoardCopy(NamedTuple):
    """A copy of what was on a board. `trace.snapshot` makes events of it."""

    head: Head
    counts: bytes
    texts: bytes
    rows: bytes

    def row(self, index: int) -> Row:
        """Return the row of an event that is still kept."""
        return Row(*_ROW.unpack_from(self.rows, index % settings.EVENTS_KEPT * _ROW.size))

    def kept(self) -> Iterator[tuple]:
        """Yield the values of all rows that are kept, in no particular order."""
        return _ROW.iter_unpack(self.rows)

    def count(self, slot: int) -> tuple[int, int]:
        """Return how many operations were posted, and how many of them were given up."""
        return _COUNT.unpack_from(self.counts, slot * _COUNT.size)


EMPTY = BoardCopy(Head(), b"", b"", b"")


def anonymous_file(purpose: str) -> BinaryIO:
    """Return an open file that has no name and is gone when its last descriptor is closed.

    Two processes can share it, and one that is killed leaves nothing behind.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # some sandboxes refuse it
            return open(os.memfd_create(f"ddp_kit {purpose}"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


class Board:
    """The status board of one rank. The rank writes; the pool reads.

    descriptor: of the file, as it comes with a new process; None makes a new board.
    """

    def __init__(self, descriptor: Any = None) -> None:
        if descriptor is None:
            self._file = anonymous_file("board")
            self._file.truncate(_SIZE)
        else:
            self._file = open(descriptor.detach(), "r+b")  # noqa: SIM115
        self._map(mmap.mmap(self._file.fileno(), _SIZE))
        self._run = self._moves = self._events = self._texts = self._counted = self._bits = 0
        self._began = self._ended = 0
        self._places: dict[bytes, int] = {}  # the number of each text

    def _map(self, page: mmap.mmap) -> None:
        self._page, self._numbers = page, memoryview(page).cast("q")

    def __reduce__(self) -> tuple:
        return Board, (reduction.DupFd(self._file.fileno()),)  # while a process is being spawned

    def answer_with_stacks(self) -> None:
        """Let this process write its stacks after the events whenever the pool asks."""
        file = self._file.fileno()
        if os.lseek(file, 0, os.SEEK_CUR) < _STACKS_AT:
            os.lseek(file, _STACKS_AT, os.SEEK_SET)
        stacks.answer_on(self._file)

    def begin(self, run: int, now: int) -> None:
        self._run, self._began, self._ended = run, now, 0
        self._events = self._texts = self._counted = self._bits = 0
        self._places = {}
        self._numbers[_WAITING] = -1
        if self._page[_STACKS_AT]:
            end = min(os.lseek(self._file.fileno(), 0, os.SEEK_CUR), _SIZE)
            self._page[_STACKS_AT:end] = bytes(end - _STACKS_AT)
            os.lseek(self._file.fileno(), _STACKS_AT, os.SEEK_SET)
        self.write_progress(None, None)
        self.write_handled(b"")
        self._write_head()

    def end(self, now: int) -> None:
        self.write_progress(None, None)
        self._ended = now
        self._write_head()

    def add_text(self, text: Any) -> int:
        """Write, once, what events have in common; return its number, or 0 if there is no room.

        It is no move: a worker that starts thread after thread may still be stuck.
        """
        # PyTorch takes NumPy's integers and tensors of one as ranks, tags and splits.
        line = json.dumps(text, default=operator.index).encode() + b"\n"
        if line in self._places or self._texts + len(line) > TEXTS:
            return self._places.get(line, 0)
        at = _TEXTS_AT + self._texts
        self._page[at : at + len(line)] = line
        self._texts = self._numbers[_TEXTS] = self._texts + len(line)
        self._places[line] = len(self._places) + 1
        return self._places[line]

    def add_count(self, text: Any) -> int:
        """Return a slot for the count of a channel or group; -1 if there is no room left."""
        if self._counted == COUNTED or not self.add_text(text):
            self.write_state(HeadBits.CROWDED)
            return -1
        self._counted += 1
        self.write_count(self._counted - 1, 0, 0)
        self._write_head()
        return self._counted - 1

    def write_count(self, slot: int, posted: int, given_up: int) -> None:
        """Write how many operations of a channel or group were posted and given up."""
        if slot >= 0:
            at = _COUNTS + 2 * slot
            self._numbers[at], self._numbers[at + 1] = posted, given_up

    def post(self, row: tuple[int, ...], slot: int, sequence: int, start: int) -> int:
        """Write that an operation was called, and its count; return its index.

        row: the values of a Row before these of the operation itself. slot: of its count.
        """
        index, numbers = self._events, self._numbers
        if slot >= 0:
            numbers[_COUNTS + 2 * slot] = sequence + 1
        at = _ROWS_AT + index % settings.EVENTS_KEPT * _ROW.size
        _ROW.pack_into(self._page, at, *row, sequence, start, 0, 0)
        self._events = numbers[_EVENTS] = index + 1
        self._moves = numbers[_MOVES] = self._moves + 1
        return index

    def begin_wait(
        self, index: int, now: int, limited: bool, shown: bool, polled: bool = False
    ) -> None:
        """Write that a thread waits for an event.

        limited: the wait ends by itself after a time. shown: the thread is the worker's own.
        polled: it is a loop that does nothing but ask whether the event is complete.
        """
        numbers = self._numbers
        if index >= self._events - settings.EVENTS_KEPT:
            at = _ROWS + index % settings.EVENTS_KEPT * _OF_ROW
            numbers[at + _ROW_WAITED], numbers[at + _ROW_END] = now, 0
        if shown:
            self._bits = (
                self._bits & _NOT_OF_WAITS | limited * HeadBits.LIMITED | polled * HeadBits.POLLED
            )
            numbers[_BITS], numbers[_WAITING] = self._bits, index
        else:
            there = RowBits.IN_THREAD | limited * RowBits.LIMITED_THERE
            self._change_bits(index, RowBits.LIMITED_THERE, there)
        self._moves = numbers[_MOVES] = self._moves + 1

    def end_wait(self, index: int, now: int, shown: bool) -> None:
        """Write that the wait has ended. now: 0 if the event did not complete."""
        if index >= self._events - settings.EVENTS_KEPT:
            self._numbers[_ROWS + index % settings.EVENTS_KEPT * _OF_ROW + _ROW_END] = now
        if shown:
            self._numbers[_WAITING] = -1
        else:
            self._change_bits(index, RowBits.IN_THREAD | RowBits.LIMITED_THERE)
        self._moves = self._numbers[_MOVES] = self._moves + 1

    def write_state(self, bit: int, holds: bool = True) -> None:
        """Write whether a bit of the head holds that is not of a wait."""
        self._bits = self._numbers[_BITS] = self._bits & ~bit | holds * bit
        self._move()

    def write_callbacks(self, index: int, left: int, limited: bool) -> None:
        """Write whether callbacks of an event are left. limited: they run after a time anyway."""
        bits = RowBits.CALLS_BACK | limited * RowBits.CALLS_BACK_SOON
        both = RowBits.CALLS_BACK | RowBits.CALLS_BACK_SOON
        self._change_bits(index, both, bits if left else 0)
        self._move()

    def write_phase(self, phase: int) -> None:
        """Write what the process is doing: IMPORTING, SERVING or FORMING."""
        self._page[_PHASE_AT] = phase

    def phase(self) -> int:
        return self._page[_PHASE_AT]

    def write_progress(self, done: int | None, total: int | None, label: str = "") -> None:
        """Write how far a loop has come. None: there is no loop, or its length is unknown."""
        steps = 0 if done is None else done + 1
        _PROGRESS.pack_into(self._page, _PROGRESS_AT, steps, 0 if total is None else total + 1)
        if label or self._page[_LABEL_AT]:
            _LABEL.pack_into(self._page, _LABEL_AT, label.encode(errors="replace"))

    def progress(self) -> tuple[int, int | None] | None:
        """Return how far a loop has come and its length; None if there is no loop."""
        done, total = _PROGRESS.unpack_from(self._page, _PROGRESS_AT)
        return (done - 1, total - 1 if total else None) if done else None

    def label(self) -> bytes:
        """Return what is written beside the progress; b"" if there is nothing."""
        return _LABEL.unpack_from(self._page, _LABEL_AT)[0].rstrip(b"\0")

    def write_handled(self, text: bytes) -> None:
        """Write which exception the worker is handling. b"": none, or one that has no room."""
        text = text if _HANDLED_AT + len(text) < _COUNTS_AT else b""
        self._page[_HANDLED_AT : _HANDLED_AT + len(text) + 1] = text + b"\0"

    def handled(self) -> bytes:
        """Return the text of the exception that the worker is handling while it waits."""
        return self._page[_HANDLED_AT:_COUNTS_AT].partition(b"\0")[0]

    def write_end(self, index: int, now: int) -> None:
        if self._is_kept(index):
            self._numbers[_row_at(index) + _ROW_END] = now

    def write_bit(self, index: int, bit: int) -> None:
        self._change_bits(index, 0, bit)

    def _change_bits(self, index: int, old: int, new: int = 0) -> None:
        """Remove some bits of an event, and add new ones."""
        if self._is_kept(index):
            at = _row_at(index) + _ROW_BITS
            self._numbers[at] = self._numbers[at] & ~old | new

    def write_source(self, index: int, source: int, sequence: int) -> None:
        """Write who sent a message that was received from any source."""
        if self._is_kept(index):
            at = _row_at(index)
            self._numbers[at + _ROW_PEER], self._numbers[at + _ROW_SEQUENCE] = source, sequence

    def _is_kept(self, index: int) -> bool:
        return index >= self._events - settings.EVENTS_KEPT

    def _move(self) -> None:
        """Show a reader, at the end of each change, that there was one."""
        self._moves = self._numbers[_MOVES] = self._moves + 1

    def _write_head(self) -> None:
        waiting = self._numbers[_WAITING]
        used = self._run, self._events, self._texts, self._counted, self._began, self._ended
        _HEAD.pack_into(self._page, 0, self._moves + 1, self._bits, waiting, *used)
        self._moves += 1

    def head(self) -> Head:
        return Head(*_HEAD.unpack_from(self._page))

    def read(self) -> BoardCopy:
        """Copy the board. If it changes all the time, the rank does not wait in the copy."""
        for _ in range(100):
            head = self.head()
            counts = self._page[_COUNTS_AT : _COUNTS_AT + head.counted * _COUNT.size]
            texts = self._page[_TEXTS_AT : _TEXTS_AT + head.texts]
            kept = min(head.events, settings.EVENTS_KEPT)
            rows = self._page[_ROWS_AT : _ROWS_AT + kept * _ROW.size]
            if self.head() == head:
                return BoardCopy(head, counts, texts, rows)
        return BoardCopy(head._replace(waiting=-1), counts, texts, rows)

    def read_counts(self) -> BoardCopy:
        """Copy what a rank that keeps moving has counted: no events, and it does not wait."""
        head = self.head()
        head = head._replace(waiting=-1, events=0, bits=head.bits & ~HeadBits.JOINS)
        counts = self._page[_COUNTS_AT : _COUNTS_AT + head.counted * _COUNT.size]
        texts = self._page[_TEXTS_AT : _TEXTS_AT + head.texts]
        return BoardCopy(head, counts, texts, b"")

    def waiting(self, run: int, since: int) -> tuple[Row, bytes] | None:
        """Return the event that the worker waits for, and its text; quicker than `read`.

        None: it is not in this run, does not wait, began to wait after `since`, or has moved on.
        """
        head = self.head()
        first = max(0, head.events - settings.EVENTS_KEPT)
        if head.run != run or not first <= head.waiting < head.events:
            return None
        row = Row(*_ROW.unpack_from(self._page, _NUMBER * _row_at(head.waiting)))
        texts = self._page[_TEXTS_AT : _TEXTS_AT + head.texts]
        if self.head() != head or row.waited > since or not row.what:
            return None
        return row, texts.split(b"\n", row.what)[row.what - 1]

    def unshare(self) -> None:
        """Write into memory of this process only from now on: it is a fork of the rank."""
        self._map(mmap.mmap(-1, _SIZE))

    def read_stacks(self) -> str:
        """Return the stacks that the rank has written so far in this run."""
        end = self._page.find(b"\0", _STACKS_AT)
        return self._page[_STACKS_AT:end].decode(errors="replace")

    def fileno(self) -> int:
        """Return the descriptor of the file, for a process that the pool does not spawn."""
        return self._file.fileno()

    def close_file(self) -> None:
        """Close the file, once the rank has it; its memory stays mapped."""
        self._file.close()

    def close(self) -> None:
        self._numbers.release()
        self._page.close()
        self._file.close()


def _row_at(index: int) -> int:
    """Return the place of an event's row among the numbers of a board."""
    return _ROWS + index % settings.EVENTS_KEPT * _OF_ROW
