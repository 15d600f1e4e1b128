"""What the notebook's process and a rank agree on: the messages of the control pipe, and names.

The messages are tuples, which are pickled and unpickled in half the time of other objects.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddp_kit.error_text import RankFailure, Wait
from ddp_kit.pool.wire.payload import Payload

# An environment variable that a rank and everything it starts inherit, to find them by.
RANK_MARK = "DDP_KIT_RANK"

# The first thing that a process started by mpiexec or torchrun sends to the pool's socket: rank,
# process id.
CALL = struct.Struct("=QQ")
SOCKET = "DDP_KIT_SOCKET"  # the environment variable that names this socket under torchrun

serving = False  # True in a rank's process, where no pool may be started

FileStamp = tuple[int, int]  # modification time in nanoseconds, size in bytes

# What a rank has displayed: IPython's representations of a value by MIME type, such as text, HTML
# and PNG, and their metadata.
Bundle = tuple[dict[str, Any], dict[str, Any]]


def file_stamp(path: str) -> FileStamp | None:
    """Return what distinguishes this version of a file from others; None if it is unreadable."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class LogSettings(NamedTuple):
    """What is printed of the records of each logger."""

    level: int  # of the root logger
    handlers: tuple[tuple[int, bytes], ...]  # its handlers that print: level, pickled formatter
    levels: dict[str, int]  # of the other loggers that have one


class Environment(NamedTuple):
    """What a rank takes over from the notebook's process before each run."""

    path: tuple[str, ...]  # sys.path
    folder: str  # the working directory
    argv: tuple[str, ...]  # sys.argv
    variables: dict[str, str]  # os.environ
    logs: LogSettings
    in_notebook: bool  # which shows what a rank displays
    is_live: bool  # a view shows bars while the run lasts


class JoinGroup(NamedTuple):
    """To a rank: leave your process group and join this one."""

    rank: int
    world_size: int
    backend: str
    store: str | None  # the file of the FileStore; None: the worker forms its own group


class CallWorker(NamedTuple):
    """To a rank: call this worker."""

    payload: Payload  # (worker, args)
    cells: dict[str, str]  # cells this rank has not seen yet: file name → source
    environment: Environment | None  # None: unchanged since the previous run
    number: int  # of the run in its pool


class RankStatus(NamedTuple):
    """The state of a rank's process after it has handled a message."""

    modules: dict[str, FileStamp]  # the learner's files that it has imported since the last one
    group_intact: bool = True  # the process group is unchanged and nothing is in flight in it
    thread: str | None = None  # a thread that still runs the worker's code
    restart: str | None = None  # why the process cannot serve another run


class Joined(NamedTuple):
    """From a rank: it is in the group."""

    status: RankStatus


class Returned(NamedTuple):
    """From a rank: the worker returned."""

    payload: Payload
    status: RankStatus
    displayed: Sequence[Bundle] = ()


class Raised(NamedTuple):
    """From a rank: joining the group, or the worker, raised."""

    failure: RankFailure
    status: RankStatus
    inside: Wait | None = None  # the wait that raised it
    displayed: Sequence[Bundle] = ()
    captured: bytes = b""  # a pickled Captured of the learner's functions; b"": there is none


class KitFailed(NamedTuple):
    """From a rank: the kit's own code raised; the process ends."""

    traceback: str
    status: RankStatus = RankStatus({}, group_intact=False)
