"""Processes by their handle: which belong to a rank, and how they are ended.

psutil is loaded on first use: a rank has no need of it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

MARK = "DDP_KIT_RANK"  # in the environment of a rank and of all that it starts


def handle_of(pid: int | None) -> Any:
    """Return a handle that will not take a later process with the same pid for this one."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def descendants(process: Any) -> list:
    """Return the processes below this one, as far as they can be seen."""
    import psutil

    try:
        return process.children(recursive=True)
    except (psutil.Error, OSError, AttributeError):
        return []


def marked(mark: str) -> list:
    """Find what a rank has left running that ended by itself: its children are nobody's now."""
    import psutil

    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                left.append(process)
    return left


def kill(process: Any) -> None:
    """End a process at once; leave it alone if it has ended already."""
    import psutil

    with suppress(psutil.Error, AttributeError):
        process.kill()
