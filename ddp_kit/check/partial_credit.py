"""Partial credit: which parts of an exercise hold for an answer that is not wholly right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
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

    def __new__(cls, parts: Mapping[str, bool], wrong: Mapping[str, str] | None = None) -> Credit:  # noqa: D102
        credit = super().__new__(cls, sum(parts.values()) / max(1, len(parts)))
        credit.parts, credit.wrong = dict(parts), dict(wrong or {})
        return credit

    def __getnewargs__(self) -> tuple:
        return self.parts, self.wrong

    def _ipython_display_(self) -> None:
        """Show nothing: a check that passes has printed its line."""


@recorded
def credit(check: Callable[[Any], Credit], answer: Any) -> Credit:
    """Try every part of an exercise, print what is wrong, and return which parts hold.

    check: such as `kit.check.exercise_4_1`, which raises at the first mistake instead. Parts about
    right answers, such as the number of messages, hold only if all results are right. A stub and
    an answer that cannot be called have 0. The environment variable DDP_KIT_CHECK_SECONDS limits
    the time for all runs together, 20 s by default; a part for which no time is left does not hold.

    Raises PoolError if the answer cannot be sent to the ranks or these do not start, BackendError
    if gloo is unavailable, and ExerciseError if that variable is not a number above 0.
    """
    trial = _try(check, answer, _limit())
    found = trial.credit()
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


def parts_of(check: Callable[[Any], Credit]) -> list[str]:
    """Return the names of an exercise's parts, without starting a rank."""
    return list(_try(check, lambda *_, **__: None, seconds=0).credit().parts)


class Trial:
    """One answer, checked again from where it failed until every part has been tried."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._cases: list[str] = []  # the parts of which each case is one
        self._others: list[str] = []
        self._case = -1  # that is being tried
        self._wrong: dict[str, str] = {}  # the first message of each part that failed

    @property
    def passed(self) -> bool:
        """Whether nothing has failed so far."""
        return not self._wrong

    def begin(self, cases: Iterable[str], others: Iterable[str]) -> None:
        """Take the parts that cases belong to, and those for right answers only."""
        self._cases, self._others = list(cases), list(others)

    def wants(self, case: int) -> bool:
        """Return whether to try a case, which is the next one then."""
        wanted = case > self._case and self._cases[case] not in self._wrong
        self._case = case if wanted else self._case
        return wanted

    def seconds_left(self) -> float:
        """Return how long runs may still take; not more than 0 if the time is up."""
        return self._end - time.monotonic()

    def has_failed(self, part: str) -> bool:
        """Return whether a part is known not to hold."""
        return part in self._wrong

    def note(self, part: str, message: str) -> None:
        """Note that a part does not hold."""
        self._wrong.setdefault(part, message)

    def fail(self, message: str) -> bool:
        """Note that the case failed; return whether there was one."""
        self.note(self._cases[self._case] if self._case >= 0 else "", message)
        return self._case >= 0

    def give_up(self, message: str) -> None:
        """Note that no part holds."""
        self._wrong = dict.fromkeys([*self._cases, *self._others], message)

    def credit(self) -> Credit:
        """Return which parts hold."""
        parts = {part: part not in self._wrong for part in self._cases}
        right = all(parts.values())
        parts |= {part: right and part not in self._wrong for part in self._others}
        return Credit(parts, self._wrong)


_TRIAL: ContextVar[Trial | None] = ContextVar("trial", default=None)


def current_trial() -> Trial | None:
    """Return the trial of `credit` in which a grader runs; None if it may raise."""
    return _TRIAL.get()


def _try(check: Callable[[Any], Credit], answer: Any, seconds: float) -> Trial:
    trial = Trial(seconds)
    token = _TRIAL.set(trial)
    try:
        again = True
        while again:
            try:
                check(answer)
                again = False
            except ExerciseError as error:
                again = trial.fail(str(error))
            except NotImplementedError as error:
                trial.give_up(f"NotImplementedError: {error}")
                again = False
    finally:
        _TRIAL.reset(token)
    return trial
