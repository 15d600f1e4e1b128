"""What a rank prints: the notebook's end of its pipe, and how much of it is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

from ddp_kit import settings

_CHUNK = 1 << 16  # as much as a pipe holds, so one read empties it
_NEWEST = 1000  # bytes of the latest output that are kept for the live view


class KeptOutput:
    """The beginning and the end of what a rank prints in a run: at most `OUTPUT_KEPT` bytes."""

    def __init__(self) -> None:
        self._beginning, self._end = bytearray(), bytearray()
        self._dropped = 0  # bytes in between

    def add(self, data: bytes) -> None:
        """Keep the data, and of what was added before only the beginning and the end."""
        room = settings.OUTPUT_KEPT // 2 - len(self._beginning)
        self._beginning += data[:room]
        self._end += data[room:]
        if (over := len(self._end) - settings.OUTPUT_KEPT // 2) > 0:
            del self._end[:over]
            self._dropped += over

    def text(self) -> str:
        """Return what is kept, with a line that says how much was left out."""
        parts, between = [self._beginning + self._end], ""
        if self._dropped:
            parts = [self._beginning, self._end]
            left_out = f"{self._dropped:,} bytes left out"
            between = f"\n... {left_out}: {settings.OUTPUT_KEPT:,} of a run are kept ...\n"
        return between.join(part.decode("utf-8", errors="replace") for part in parts)


class RankOutput:
    """The read end of the pipe that one rank prints to, and what came through it."""

    def __init__(self, pipe: Connection) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self.is_open = True  # False once the rank has closed both its stdout and its stderr
        self.newest = b""  # the last bytes that were printed
        self._kept = KeptOutput()

    def read(self) -> bool:
        """Read what has been printed; return False if there was nothing."""
        try:
            data = os.read(self.pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            self.is_open = False  # other code has closed it
            return False
        self.is_open = bool(data)
        self._kept.add(data)
        self.newest = (self.newest + data[-_NEWEST:])[-_NEWEST:]
        return bool(data)

    def take(self) -> str:
        """Return what was printed since the last call, as text."""
        text = self._kept.text()
        self._kept, self.newest = KeptOutput(), b""
        return text


def drain(outputs: Sequence[RankOutput]) -> None:
    """Read all that is in the pipes, but not what a flood keeps adding."""
    for output in outputs:
        for _ in range(32):
            if not output.is_open or output.pipe.closed or not output.read():
                break
