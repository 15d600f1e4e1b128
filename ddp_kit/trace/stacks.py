"""Lines of code: whose they are, and which of them a process runs at this moment.

`faulthandler` answers a signal without Python's help, so a process that is stuck in native code
answers too. It writes into the file of the board, past everything that the board itself writes.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import linecache
import os
import re
import signal
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import BinaryIO

import torch.distributed as dist

from ddp_kit.error_text import Frame, RankFailure, text_of

_KIT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LESSONS = os.path.join(_KIT, "lessons", "")  # are there to be edited
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platlib", "purelib")}
    | {folder + os.sep for folder in (*site.getsitepackages(), site.getusersitepackages())}
    | {"<frozen ", _KIT}
)
# Of other environments, which a .pth file or PYTHONPATH may add.
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
# By Python itself, as for a dataclass, by libraries, and by the compiler behind torch.compile.
_GENERATED = ("<string>", "<eval_with_key>", "<attrs generated", "<decorator-gen", "<lambdifyg")
_CACHE = os.path.join(tempfile.gettempdir(), "torchinductor_")
_OF_DYNAMO = ("__compiled_fn", "__resume_at")  # what such a function calls
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")  # the rest of a function
_STANDARD = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")
C10D = sys.modules[dist.all_reduce.__module__].__file__  # where PyTorch defines its collectives
# What a learner calls of DTensor, and what calls collectives. It may not be imported yet.
_DTENSOR = os.path.join(os.path.dirname(dist.__file__), "tensor", "_api.py")
_OF_DTENSOR = {"distribute_tensor", "from_local", "full_tensor", "redistribute"}
_LONGEST_MESSAGE = 200  # characters of an exception that a rank is handling
# A real-time signal, because programs use none of these. Other systems ignore an unexpected SIGURG.
_SIGNAL = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGURG", 0)
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+) ")


@functools.cache
def is_own(filename: str) -> bool:
    """Return whether a file is the learner's code, lessons included, and not a library's."""
    library = filename.startswith(_LIBRARIES) or _PACKAGES.search(filename) is not None
    return filename.startswith(_LESSONS) or not (library or is_generated(filename))


@functools.cache
def is_generated(filename: str) -> bool:
    """Return whether a library or a compiler has made the code that has this as its file."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _CACHE
    return filename.startswith((cache, _CACHE, *_GENERATED))


def is_kit(filename: str) -> bool:
    """Return whether a file belongs to the kit itself, lessons not included."""
    return filename.startswith(_KIT) and not filename.startswith(_LESSONS)


def in_standard_library(filename: str) -> bool:
    """Return whether a file belongs to Python itself, and not to a package or to the learner."""
    # Packages may be in a folder below that of the standard library.
    return filename.startswith(_STANDARD) and "-packages" + os.sep not in filename


def own_frame(frame: FrameType | None) -> FrameType | None:
    """Return `frame`, or the nearest of its callers, that runs the learner's own code."""
    return find_caller(frame)[0]


def find_caller(frame: FrameType | None) -> tuple[FrameType | None, str, str]:
    """Return the learner's own frame, and the function of `torch.distributed` that it called.

    The last value is a prefix: the function of DTensor that called it for the learner, as in
    "redistribute "; "" if there is none.
    """
    name = of_dtensor = ""
    generated = False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if is_own(file):
            if not (generated and is_compiled(code)):
                break
        elif file == C10D:
            name = "" if code.co_name.startswith("_") else code.co_name
        elif file == _DTENSOR and code.co_name in _OF_DTENSOR:
            of_dtensor = f"{code.co_name} "
        else:
            generated = generated or is_generated(file)
        frame = frame.f_back
    return frame, name, of_dtensor


def is_compiled(code: CodeType) -> bool:
    """Return whether this is what torch.compile has made of a function, without its lines.

    It has called generated code, and the function itself is its caller.
    """
    return any(name.startswith(_OF_DYNAMO) for name in code.co_names)


def describe_line(file: str, line: int, function: str) -> Frame:
    """Return one line of code as plain data, with its text if that can be read."""
    function = _RESUMED.sub(r"\1", function)
    return Frame(file, line, function, linecache.getline(file, line).strip(), is_own(file))


def write_handled(error: BaseException | None) -> bytes:
    """Return an exception that is being handled as text; b"" if no line of it is the learner's."""
    step, own = getattr(error, "__traceback__", None), None
    while step is not None:
        own = step if is_own(step.tb_frame.f_code.co_filename) else own
        step = step.tb_next
    if own is None:
        return b""
    code = own.tb_frame.f_code
    line = describe_line(code.co_filename, own.tb_lineno, code.co_name)
    message = text_of(error)[:_LONGEST_MESSAGE]
    text = [type(error).__name__, message, line.file, line.line, line.function, line.source]
    return json.dumps(text).encode()


def read_handled(rank: int, text: bytes) -> RankFailure | None:
    """Return the exception that `write_handled` has written; None if there was none."""
    try:
        kind, message, *line = json.loads(text)
    except ValueError:  # it is empty, or the rank has gone on and is writing the next one
        return None
    return RankFailure(rank, kind, message, (Frame(*line, own=True),))


def answer_on(file: BinaryIO) -> None:
    """Let this process write the stacks of its threads to `file` whenever another one asks."""
    faulthandler.unregister(_SIGNAL)  # else a handler that was set since would stay
    faulthandler.register(_SIGNAL, file=file, all_threads=True)


def ask(processes: Mapping[int, Callable[[], str]], seconds: float = 2.0) -> list[str]:
    """Ask processes for their stacks, all at once; return their answers, "" for each without one.

    processes: what reads all that a process has answered so far, by process id.
    seconds: how long nothing more must come until those that have not answered are given up.
    """
    asked = {pid: read for pid, read in processes.items() if _would_answer(pid)}
    before = {pid: read() for pid, read in asked.items()}
    for pid in asked:
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
    deadline, answers = time.monotonic() + seconds, before
    while asked and time.monotonic() < deadline:
        time.sleep(0.01)
        newest = {pid: read() for pid, read in asked.items()}
        if newest != answers:
            deadline, answers = time.monotonic() + seconds, newest
        # They compete for the cores: one answer is complete when nobody adds to any.
        elif all(newest[pid] != before[pid] for pid in asked):
            break
    return [answers[pid][len(before[pid]) :] if pid in asked else "" for pid in processes]


class Stack(list[Frame]):
    """The lines that a thread runs, the innermost first. thread: its `ident`, if it is known."""

    thread = 0


def _would_answer(pid: int) -> bool:
    """Return whether a process handles the signal, which would otherwise end it."""
    caught = None
    with suppress(OSError):  # not Linux, or it has ended
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is None or bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)


def parse(text: str) -> list[list[Frame]]:
    """Return the stacks of all threads, the main thread's first.

    On a busy machine, the text may begin with the rest of an earlier answer.
    """
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if stacks and (found := _LINE.match(line)):
            file, number, function = found.groups()
            stacks[-1].append(describe_line(file, int(number), function))
        elif found := _THREAD.match(line):
            stacks.append(Stack())
            stacks[-1].thread = int(found[1], 16)
    return stacks[::-1]
