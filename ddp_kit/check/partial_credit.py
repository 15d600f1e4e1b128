"""Partial credit: which parts of an exercise hold for an answer that is not wholly right."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ddp_kit.errors import ExerciseError
from ddp_kit.progress_file import recorded

SECONDS = 20.0  # for all runs of an answer: less than the 30 s that nbgrader gives a cell


class Credit(float):
    """The share of an exercise's parts that hold, 0.0 to 1.0.

    parts: whether each of them holds, by name. wrong: what is wrong, by the part that it is in.
    """

    parts: dict[str, bool]
    wrong: dict[str, str]
    picture: Any = None  # of the answer to a record

    def __new__(cls, parts: Mapping[str, bool], wrong: Mapping[str, str] | None = None) -> Credit:  # noqa: D102
        credit = super().__new__(cls, sum(parts.values()) / max(1, len(parts)))
        credit.parts, credit.wrong = dict(parts), dict(wrong or {})
        return credit

    def __getnewargs__(self) -> tuple:
        return self.parts, self.wrong

    def _ipython_display_(self) -> None:
        """Show the picture, or nothing: a check that passes has printed its line."""
        if self.picture is not None:
            from IPython.display import display  # which calls this method, so it is there

            display(self.picture)


@recorded
def credit(check: Any, answer: Any) -> Credit:
    """Try every part of an exercise, print what is wrong, and return which parts hold.

    check: such as `kit.check.exercise_4_1`, which raises at the first mistake instead. Parts about
    right answers, such as the number of messages, hold only if all results are right. A stub and
    an answer that cannot be called have 0. The environment variable DDP_KIT_CHECK_SECONDS limits
    the time for all runs together, 20 s by default; a part for which no time is left does not hold.

    Raises PoolError if the answer cannot be sent to the ranks or these do not start, BackendError
    if gloo is unavailable, and ExerciseError if that variable is not a number above 0.
    """
    found = check.exercise.credit(answer, _limit())
    if found < 1:
        parts = [f"{'yes' if holds else 'no':4}{part}" for part, holds in found.parts.items()]
        print(*dict.fromkeys(found.wrong.values()), *parts, sep="\n")
    return found


def _limit() -> float:
    text = os.environ.get("DDP_KIT_CHECK_SECONDS", str(SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise ExerciseError(f"DDP_KIT_CHECK_SECONDS must be a number above 0, got {text!r}")
    return seconds
