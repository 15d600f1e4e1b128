"""The class view: one line for each check, in the file that the teacher names.

It is off unless `DDP_KIT_PROGRESS` names a file. `python -m ddp_kit.course progress` reads it.
A line has no code, no values and no time of day, and no name unless `DDP_KIT_LEARNER` sets one.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from ddp_kit.errors import ExerciseError, RankError

RANKS_CELL = "%%ranks"  # recorded like an exercise
P, R = ParamSpec("P"), TypeVar("R")
_open: ContextVar[dict[str, Any] | None] = ContextVar("line", default=None)
_refused: set[str] = set()  # the files that could not be written, each reported once


def in_order(number: str) -> tuple[int, bool, int | str]:
    """Return by what tasks are sorted: 4.a, which is in lesson 4, before 4.1; projects last."""
    lesson, _, rest = number.replace("P", "99.").partition(".")
    return int(lesson), rest.isdigit(), int(rest) if rest.isdigit() else rest


def recorded(check: Callable[P, R]) -> Callable[P, R]:
    """Return a check that adds its line: `exercise_4_1`, or `credit`, whose argument has the name.

    A line of `credit` has the first mistake of the checks that it calls; these add none.
    """

    @functools.wraps(check)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        named = check if check.__name__ != "credit" else next(iter(args), None)
        with recording(getattr(getattr(named, "exercise", None), "number", "")) as line:
            outcome = check(*args, **kwargs)
            line |= _parts(outcome)
            if isinstance(outcome, float):
                line["passed"] = outcome == 1
        return outcome

    return call


@contextmanager
def recording(exercise: str) -> Iterator[dict[str, Any]]:
    """Add a line when the block ends, also if it raises; yield what the line will have."""
    path, outer = os.environ.get("DDP_KIT_PROGRESS"), _open.get()
    line: dict[str, Any] = {"exercise": exercise, "passed": True}
    begun, token = time.monotonic(), _open.set(line)
    try:
        yield line
    except BaseException as error:
        line |= {"passed": False, "error": type(error).__name__, **_parts(error)}
        if mistake := _mistake(error):
            (line if outer is None else outer).setdefault("mistake", mistake)
        raise
    finally:
        _open.reset(token)
        if path and outer is None:
            line["seconds"] = round(time.monotonic() - begun, 1)
            line |= {"learner": name} if (name := os.environ.get("DDP_KIT_LEARNER")) else {}
            _append(path, line)


def _parts(outcome: Any) -> dict[str, dict[str, bool]]:
    """Return which parts of an exercise hold, if a check has returned or raised them."""
    parts = getattr(getattr(outcome, "credit", outcome), "parts", None)
    return {"parts": dict(parts)} if parts else {}


def _mistake(error: BaseException) -> str:
    """Return what was done wrong, or else how to fix it; "" if that may name a variable."""
    if isinstance(error, ExerciseError):
        return error.mistake or _mistake(error.error)
    return "" if isinstance(error, RankError) else getattr(error, "hint", "")


def _append(path: str, line: dict[str, Any]) -> None:
    """Add one line to a file, or say once in this process that it cannot be done."""
    try:
        with open(path, "ab", buffering=0) as file:  # one write is not mixed with another process'
            file.write(json.dumps(line).encode() + b"\n")
    except OSError as error:
        if path not in _refused:
            _refused.add(path)
            why = error.strerror
            print(f"DDP_KIT_PROGRESS: nothing is recorded in {path}: {why}.", file=sys.stderr)
