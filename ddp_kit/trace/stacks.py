"""Which lines a process runs at this moment, asked from outside.

`faulthandler` answers a signal without Python's help, so a process that sits in native code
answers too. It writes to the board's file, behind the board.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from ddp_kit.failures import Frame
from ddp_kit.trace.call_site import describe_line

_SIGNAL = getattr(signal, "SIGUSR1", None)  # None where there are no such signals
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def answer_on(file: BinaryIO) -> None:
    """Have this process write the stacks of its threads to `file` whenever it is asked."""
    if _SIGNAL is not None:
        faulthandler.register(_SIGNAL, file=file, all_threads=True)


def ask(pid: int, read: Callable[[], str], seconds: float = 0.3) -> str:
    """Ask a process; return its answer, or "" if none came within `seconds`."""
    if _SIGNAL is None:
        return ""
    before = read()
    with suppress(ProcessLookupError):
        os.kill(pid, _SIGNAL)
    deadline, answer = time.monotonic() + seconds, before
    while time.monotonic() < deadline:
        time.sleep(0.01)
        newest = read()
        if newest == answer != before:  # nothing was added meanwhile: it is whole
            break
        answer = newest
    return answer[len(before) :]


def parse(text: str) -> list[list[Frame]]:
    """Return the stacks of all threads, the main thread's first; the innermost line first."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found:
            file, number, function = found.groups()
            stacks[-1].append(describe_line(file, int(number), function))
        elif line.startswith(("Thread ", "Current thread ")):
            stacks.append([])
    return stacks[::-1]
