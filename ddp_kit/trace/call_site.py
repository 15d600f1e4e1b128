"""Which line of the learner's own code is running."""

from __future__ import annotations

import functools
import linecache
import os
import site
import sysconfig
from types import FrameType

from ddp_kit.failures import Frame

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platlib", "purelib")}
    | {folder + os.sep for folder in (*site.getsitepackages(), site.getusersitepackages())}
    | {
        os.path.join(_PACKAGE, name) + os.sep
        for name in ("check", "launch", "mpi", "notebook", "pool", "trace")
    }
    | {"<frozen "}
)


@functools.cache
def is_own(filename: str) -> bool:
    """Tell the learner's code, lessons included, from libraries and the kit's inside."""
    return not filename.startswith(_LIBRARIES)


def own_frame(frame: FrameType | None) -> FrameType | None:
    """Return `frame`, or the nearest of its callers, that runs the learner's own code."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def describe_line(file: str, line: int, function: str) -> Frame:
    """Return one line of code as plain data, with its text where that can be read."""
    return Frame(file, line, function, linecache.getline(file, line).strip(), is_own(file))
