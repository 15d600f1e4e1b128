"""What travels through torchrun's store between the notebook and the ranks of other hosts.

    a rank, or the observer beside it       the notebook
    "sign RANK": a Sign                 ▶   is it alive, and has anything moved?
    "board RANK": a copy of its board   ▶   judged together with the boards of its own host
    "asked": the number of a question   ◀   is that still so, everywhere at this moment?
    "answer NUMBER RANK": an Answer     ▶
    "ends": a line for each rank        ▶   who has returned, raised or died
    "report RANK": a RemoteReport       ▶   value or failure, output and trace
    "over"                              ◀   all reports have arrived: the rank may leave

The store is that of torchrun's agent on the notebook's host, so nothing else needs to listen.
"""

from __future__ import annotations

import os
import pickle
import sysconfig
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_kit import settings
from ddp_kit.error_text import Frame, RankFailure
from ddp_kit.trace import EMPTY, BoardCopy, Clock
from ddp_kit.trace.board import Head

ASKED, ENDS, OVER = "asked", "ends", "over"
# How a rank ended. CUT: it raised in a wait, probably because another rank was gone. TERMINATED: by
# SIGTERM, probably of torchrun because another rank had failed. STOPPED: after torchrun itself.
RETURNED, RAISED, CUT, DIED = "returned", "raised", "cut", "died"
TERMINATED, STOPPED = "terminated", "stopped"


class Sign(NamedTuple):
    """A sign of life.

    number: how many there were before. shown: the board is in the store as it is now. head: of the
    board.
    """

    number: int
    shown: bool
    head: Head


class Answer(NamedTuple):
    """What a rank was doing when it was asked.

    moves: as in the head of its board. quiet: seconds since they changed. stacks: of its threads,
    the main thread's first; the innermost line first.
    """

    moves: int
    quiet: float
    stacks: list[list[Frame]]


def newest(copy: BoardCopy, many: int) -> BoardCopy:
    """Return the copy of a board without events but the newest ones, and the one waited for."""
    first = copy.head.events - many
    if first <= 0:
        return copy
    kept = min(copy.head.events, settings.EVENTS_KEPT)
    rows, size = bytearray(len(copy.rows)), len(copy.rows) // kept
    for index in {*range(first, copy.head.events), max(0, copy.head.waiting)}:
        at = slice(index % kept * size, (index % kept + 1) * size)
        rows[at] = copy.rows[at]
    return copy._replace(rows=bytes(rows))


@dataclass
class RemoteReport:
    """What a rank on another host reports when its worker has returned or raised.

    value: pickled. log: a copy of its board. clock: of its host.
    """

    value: bytes = b""
    output: str = ""
    failure: RankFailure | None = None
    log: BoardCopy = EMPTY
    clock: Clock | None = None


# Folders that may have other names on another host, and what stands for them on the way.
_NAMES = {
    str(Path(__file__).absolute().parents[2]): "<kit>",
    sysconfig.get_path("stdlib"): "<stdlib>",
}


def encode(value: Sign | Answer | BoardCopy | RemoteReport) -> bytes:
    """Return it as bytes, without the names of this host's folders."""
    value = _renamed(value, _NAMES) if isinstance(value, Answer) else value
    return zlib.compress(pickle.dumps(value), 1)


def decode(sent: bytes) -> Any:
    """Return what was encoded, with the names of this host's folders."""
    value = pickle.loads(zlib.decompress(sent))
    folders = {name: folder for folder, name in _NAMES.items()}
    return _renamed(value, folders) if isinstance(value, Answer) else value


def _renamed(answer: Answer, beginnings: Mapping[str, str]) -> Answer:
    def rename(frame: Frame) -> Frame:
        old = next((old for old in beginnings if frame.file.startswith(old + os.sep)), "")
        file = beginnings.get(old, "") + frame.file.removeprefix(old)
        return replace(frame, file=file)

    return answer._replace(stacks=[[*map(rename, stack)] for stack in answer.stacks])


class Silence:
    """How long another process has sent nothing, without the time in which this one was stopped.

    seconds: the time, up to the last call of `look`.
    """

    def __init__(self) -> None:
        self.seconds, self._looked = 0.0, time.monotonic()

    def look(self, heard: bool) -> None:
        """Note whether anything has come since the last call; call it several times a second."""
        now = time.monotonic()
        self.seconds = 0.0 if heard else self.seconds + min(now - self._looked, 1.0)
        self._looked = now


def connect(address: str, port: int, seconds: float) -> dist.Store:
    """Return a connection of one's own to the store, with keys of their own.

    A connection serves one request at a time, so a long wait on one does not delay another.
    """
    limit = timedelta(seconds=seconds)
    client = dist.TCPStore(address, port, is_master=False, timeout=limit)
    return dist.PrefixStore("ddp_kit ranks", client)
