"""What a rank prints: the notebook's end of its pipe, and how much it may print."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from multiprocessing.connection import Connection

OUTPUT_LIMIT = 200_000  # bytes that one rank may print in one run; the rest is dropped
_CHUNK = 1 << 16  # as much as a pipe holds, so one read empties it
_NEWEST = 1000  # bytes of the latest output that are kept for the live view


class RankOutput:
    """The read end of the pipe that one rank prints to, and what came through it."""

    def __init__(self, pipe: Connection) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self.is_open = True  # False once the rank has closed both its stdout and its stderr
        self.newest = b""  # the last bytes that were printed
        self._kept = bytearray()
        self._cut = False

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
        room = OUTPUT_LIMIT - len(self._kept)
        self._kept += data[:room]
        self.newest = (self.newest + data[-_NEWEST:])[-_NEWEST:]
        self._cut = self._cut or len(data) > room
        return bool(data)

    def take(self) -> str:
        """Return what was printed since the last call, as text."""
        text = self._kept.decode("utf-8", errors="replace")
        if self._cut:
            text += f"\n... cut here: a rank may print {OUTPUT_LIMIT:,} bytes in one run\n"
        self._kept, self._cut, self.newest = bytearray(), False, b""
        return text


def drain(outputs: Sequence[RankOutput]) -> None:
    """Read all that is in the pipes, but not what a flood keeps adding."""
    poll = select.poll()
    is_open = [output for output in outputs if output.is_open and not output.pipe.closed]
    at = {output.pipe.fileno(): output for output in is_open}
    for descriptor in at:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(0):
        for _ in range(32):
            if not at[descriptor].read():
                break
