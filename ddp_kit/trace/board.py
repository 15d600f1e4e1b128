"""The status board: what a rank is waiting in, readable while the rank is stuck.

A rank that waits in native code answers no question. So it says where it goes before it goes
there: it writes into a page of memory that the pool's process maps too. The page is a file
without a name; it is gone when both processes are.
"""

from __future__ import annotations

import json
import mmap
import struct
from multiprocessing import reduction
from typing import Any

from ddp_kit.failures import Frame, Wait
from ddp_kit.trace.unnamed import unnamed_file

_SIZE = 4096  # bytes: one page
_HEAD = struct.Struct("QI")  # how often it was written, odd while being written; length of text


class Board:
    """One rank's page. The rank writes; the pool reads."""

    def __init__(self, descriptor: Any = None) -> None:
        """Make a page, or map the one behind a descriptor that came with a new process."""
        if descriptor is None:
            self._file = unnamed_file("board")
            self._file.truncate(_SIZE)
        else:
            self._file = open(descriptor.detach(), "r+b")  # noqa: SIM115
        self._page = mmap.mmap(self._file.fileno(), _SIZE)
        self._writes = 0

    def __reduce__(self) -> tuple:
        return Board, (reduction.DupFd(self._file.fileno()),)  # while a process is being spawned

    def enter(self, op: str, where: Frame | None) -> None:
        """Write that this rank waits in `op`, called at `where`."""
        place = where and [where.file, where.line, where.function, where.source[:300]]
        self._write(json.dumps([op, place]).encode())

    def leave(self) -> None:
        """Write that this rank waits in nothing any more."""
        self._write(b"")

    def _write(self, text: bytes) -> None:
        if len(text) > _SIZE - _HEAD.size:
            text = json.dumps([json.loads(text)[0], None]).encode()  # a very long path
        self._writes += 2
        _HEAD.pack_into(self._page, 0, self._writes - 1, len(text))
        self._page[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._page, 0, self._writes, len(text))

    def read(self, rank: int) -> Wait:
        """Return what the rank, which goes by this number now, waits in."""
        for _ in range(100):
            writes, length = _HEAD.unpack_from(self._page)
            text = self._page[_HEAD.size : _HEAD.size + length]
            if writes % 2 == 0 and _HEAD.unpack_from(self._page)[0] == writes:
                break
        else:
            text = b""  # it writes without pause: it is busy
        if not text:
            return Wait(rank, None)
        op, place = json.loads(text)
        return Wait(rank, op, place and Frame(*place, own=True))

    def close_file(self) -> None:
        """Let go of the file, once the rank has it; the page stays mapped."""
        self._file.close()

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()
        self._file.close()
