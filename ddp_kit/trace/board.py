"""The status board: what a rank has called and what it waits in, readable while it is stuck.

A rank that waits in native code answers no question. So it says where it goes before it goes
there: it writes into memory that the pool's process maps too. The memory is a file without a
name; it is gone when both processes are.

    head      which run, how many events, which one is waited for
    progress  how far a loop of the worker has come, and how many steps it has
    counts    of each channel and each group: how many operations were posted, how many given up
    texts     what events have in common, one JSON line each: channels, calls, lines of code
    events    the newest `EVENTS`, in a ring
    stacks    which lines its threads run, written when the pool asks

The head is written last: who finds the same head before and after has read what belongs to it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any, NamedTuple

from ddp_kit.trace import stacks
from ddp_kit.trace.unnamed import anonymous_file

EVENTS = 1 << 16  # events of a rank that are kept; older ones make room
COUNTED = 1 << 13  # channels and groups of a rank that can be counted
TEXTS = 1 << 22  # bytes

# Bits of a head: why a wait may end by itself, or why nothing can be concluded from the counts.
LIMITED, CROWDED = 1, 2
# Bits of a row: somebody asked whether it is complete, or for its future; the call has raised;
# a message whose work ended before anybody had waited for it.
LOOKED_AFTER, VOID, GIVEN_UP = 1, 2, 4

_HEAD = struct.Struct("=QQqQQQQqq")
_HEAD_OF_ROW, _HEAD_OF_WAIT = struct.Struct("=QQqQQ"), struct.Struct("=QQq")  # its beginnings
_PROGRESS = struct.Struct("=QQ")  # each one more than it is; 0: there is none
_COUNT = struct.Struct("=II")
_ROW = struct.Struct("=IIiIqqQQQ")
_PEER, _BITS, _SEQUENCE = struct.Struct("=i"), struct.Struct("=I"), struct.Struct("=q")
_WAITED_END, _END = struct.Struct("=QQ"), struct.Struct("=Q")
_PEER_AT, _BITS_AT, _SEQUENCE_AT, _WAITED_AT, _END_AT = 8, 12, 24, 40, 48
_PROGRESS_AT = 1024
_COUNTS_AT = 4096
_TEXTS_AT = _COUNTS_AT + COUNTED * _COUNT.size
_ROWS_AT = _TEXTS_AT + TEXTS
_STACKS_AT = _ROWS_AT + EVENTS * _ROW.size
_SIZE = _STACKS_AT + (1 << 16)


class Head(NamedTuple):
    """What there is to read on a board."""

    moves: int = 0  # how often anything was written
    bits: int = 0
    waiting: int = -1  # the event that the worker waits for; -1: none
    run: int = 0  # the pool's number of the run that this is about
    events: int = 0  # how many there were
    texts: int = 0  # bytes
    counted: int = 0
    began: int = 0  # nanoseconds of the monotonic clock, when the worker was called
    ended: int = 0  # and when it was over; 0: it is not


class Row(NamedTuple):
    """One event, in numbers. A text is named by its number, from 1; 0: there was no room."""

    what: int
    where: int
    peer: int  # rank in the world; -1: none, or any
    bits: int
    tag: int
    sequence: int
    start: int
    waited: int
    end: int


class BoardCopy(NamedTuple):
    """A copy of what stood on a board. `trace.snapshot` makes events of it."""

    head: Head
    counts: bytes
    texts: bytes
    rows: bytes

    def row(self, index: int) -> Row:
        """Return an event that is still kept."""
        return Row(*_ROW.unpack_from(self.rows, index % EVENTS * _ROW.size))

    def kept(self) -> Iterator[tuple]:
        """Go through the values of all rows that are kept, quickly and in no certain order."""
        return _ROW.iter_unpack(self.rows)

    def count(self, slot: int) -> tuple[int, int]:
        """Return how many operations were posted, and how many of them given up."""
        return _COUNT.unpack_from(self.counts, slot * _COUNT.size)


EMPTY = BoardCopy(Head(), b"", b"", b"")


class Board:
    """One rank's page. The rank writes; the pool reads."""

    def __init__(self, descriptor: Any = None) -> None:
        """Make a page, or map the one behind a descriptor that came with a new process."""
        if descriptor is None:
            self._file = anonymous_file("board")
            self._file.truncate(_SIZE)
        else:
            self._file = open(descriptor.detach(), "r+b")  # noqa: SIM115
        self._page = mmap.mmap(self._file.fileno(), _SIZE)
        self._run = self._moves = self._events = self._texts = self._counted = self._bits = 0
        self._waiting, self._began, self._ended, self._lines = -1, 0, 0, 0
        self._found = 0, 0, b""  # the text that was looked up last: its run, its number

    def __reduce__(self) -> tuple:
        return Board, (reduction.DupFd(self._file.fileno()),)  # while a process is being spawned

    def answer_with_stacks(self) -> None:
        """Have this process write its stacks behind the events whenever the pool asks."""
        os.lseek(self._file.fileno(), _STACKS_AT, os.SEEK_SET)
        stacks.answer_on(self._file)

    def begin(self, run: int, now: int) -> None:
        """Forget the run before."""
        self._run, self._events, self._texts, self._counted, self._bits = run, 0, 0, 0, 0
        self._waiting, self._began, self._ended, self._lines = -1, now, 0, 0
        self._forget_stacks()
        self.write_progress(None, None)
        self._write_head()

    def _forget_stacks(self) -> None:
        """Make room for new answers, if there are any: the pool asks again in another wait."""
        if self._page[_STACKS_AT]:
            self._page[_STACKS_AT:] = bytes(_SIZE - _STACKS_AT)
            os.lseek(self._file.fileno(), _STACKS_AT, os.SEEK_SET)

    def end(self, now: int) -> None:
        """Note that the worker is over."""
        self.write_progress(None, None)
        self._ended = now
        self._write_head()

    def add_text(self, text: Any) -> int:
        """Write down what events have in common; return its number, or 0 for lack of room."""
        line = json.dumps(text).encode() + b"\n"
        if self._texts + len(line) > TEXTS:
            return 0
        at = _TEXTS_AT + self._texts
        self._page[at : at + len(line)] = line
        self._texts += len(line)
        self._lines += 1
        self._write_head()
        return self._lines

    def add_count(self, text: Any) -> int:
        """Return the place for the count of a channel or group; -1 if there is no room left."""
        if self._counted == COUNTED or not self.add_text(text):
            self._bits |= CROWDED
            return -1
        self._counted += 1
        self.write_count(self._counted - 1, 0, 0)
        self._write_head()
        return self._counted - 1

    def write_count(self, slot: int, posted: int, given_up: int) -> None:
        """Write how many operations of a channel or group were posted, and given up."""
        if slot >= 0:
            _COUNT.pack_into(self._page, _COUNTS_AT + slot * _COUNT.size, posted, given_up)

    def add_row(self, *row: int) -> int:
        """Write down an event and return its number. row: the values of a Row."""
        index = self._events
        _ROW.pack_into(self._page, _ROWS_AT + index % EVENTS * _ROW.size, *row)
        self._events = index + 1
        self._moves += 1
        _HEAD_OF_ROW.pack_into(
            self._page, 0, self._moves, self._bits, self._waiting, self._run, self._events
        )
        return index

    def begin_wait(self, index: int, now: int, limited: bool, shown: bool) -> None:
        """Write that somebody waits for an event.

        limited: the wait ends by itself after a time. shown: it is the worker who waits.
        """
        if self._is_kept(index):
            _WAITED_END.pack_into(self._page, _row_at(index) + _WAITED_AT, now, 0)
        if shown:
            self._forget_stacks()
            self._waiting = index
            self._bits = self._bits & ~LIMITED | (LIMITED if limited else 0)
        self._moves += 1
        _HEAD_OF_WAIT.pack_into(self._page, 0, self._moves, self._bits, self._waiting)

    def end_wait(self, index: int, now: int, shown: bool) -> None:
        """Write that the wait is over; now: 0 if the event did not complete."""
        self.write_end(index, now)
        if shown:
            self._waiting = -1
        self._moves += 1
        _HEAD_OF_WAIT.pack_into(self._page, 0, self._moves, self._bits, self._waiting)

    def write_progress(self, done: int | None, total: int | None) -> None:
        """Write how far a loop has come; None: there is none, or its end is not known."""
        written = (0 if number is None else number + 1 for number in (done, total))
        _PROGRESS.pack_into(self._page, _PROGRESS_AT, *written)

    def progress(self) -> tuple[int, int | None] | None:
        """Return how far a loop has come, and how many steps it has; None: there is none."""
        done, total = _PROGRESS.unpack_from(self._page, _PROGRESS_AT)
        return (done - 1, total - 1 if total else None) if done else None

    def write_end(self, index: int, now: int) -> None:
        """Write when an event was complete."""
        if self._is_kept(index):
            _END.pack_into(self._page, _row_at(index) + _END_AT, now)

    def write_bits(self, index: int, bits: int) -> None:
        """Write the bits of an event."""
        if self._is_kept(index):
            _BITS.pack_into(self._page, _row_at(index) + _BITS_AT, bits)

    def write_source(self, index: int, source: int, sequence: int) -> None:
        """Write where a message from any source has come from."""
        if self._is_kept(index):
            _PEER.pack_into(self._page, _row_at(index) + _PEER_AT, source)
            _SEQUENCE.pack_into(self._page, _row_at(index) + _SEQUENCE_AT, sequence)

    def _is_kept(self, index: int) -> bool:
        return index >= self._events - EVENTS

    def _write_head(self) -> None:
        self._moves += 1
        _HEAD.pack_into(
            *(self._page, 0, self._moves, self._bits, self._waiting, self._run, self._events),
            *(self._texts, self._counted, self._began, self._ended),
        )

    def head(self) -> Head:
        """Read what there is to read."""
        return Head(*_HEAD.unpack_from(self._page))

    def read(self) -> BoardCopy:
        """Copy the board. A rank that writes meanwhile leaves a copy in which it does not wait."""
        for _ in range(100):
            head = self.head()
            counts = self._page[_COUNTS_AT : _COUNTS_AT + head.counted * _COUNT.size]
            texts = self._page[_TEXTS_AT : _TEXTS_AT + head.texts]
            rows = self._page[_ROWS_AT : _ROWS_AT + min(head.events, EVENTS) * _ROW.size]
            if self.head() == head:
                return BoardCopy(head, counts, texts, rows)
        return BoardCopy(head._replace(waiting=-1), counts, texts, rows)

    def waiting(self, run: int, since: int) -> tuple[Row, bytes] | None:
        """Return the event that the worker waits for, and its text; quicker than to `read` all.

        None: it is not in this run, does not wait, began to after `since`, or has just moved on.
        """
        head = self.head()
        if head.run != run or not max(0, head.events - EVENTS) <= head.waiting < head.events:
            return None
        row = Row(*_ROW.unpack_from(self._page, _row_at(head.waiting)))
        texts = b""
        if row.waited <= since and self._found[:2] != (run, row.what):
            texts = self._page[_TEXTS_AT : _TEXTS_AT + head.texts]
        if self.head() != head or row.waited > since or not row.what:
            return None
        if texts:
            self._found = run, row.what, texts.split(b"\n", row.what)[row.what - 1]
        return row, self._found[2]

    def read_stacks(self) -> str:
        """Return what the rank has answered so far in this run."""
        text = self._page[_STACKS_AT:]
        return text[: text.find(b"\0")].decode(errors="replace")

    def fileno(self) -> int:
        """Return the descriptor of the file, for a process that is not spawned."""
        return self._file.fileno()

    def close_file(self) -> None:
        """Let go of the file, once the rank has it; the page stays mapped."""
        self._file.close()

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()
        self._file.close()


def _row_at(index: int) -> int:
    return _ROWS_AT + index % EVENTS * _ROW.size
