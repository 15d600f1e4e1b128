"""`progress FOLDER`: which exercise stops whom, and which mistakes are made most.

FOLDER has the files that `DDP_KIT_PROGRESS` named, one or many; ddp_kit/progress_file.py writes
them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ddp_kit.error_text import count
from ddp_kit.errors import CourseError
from ddp_kit.plot.picture import table
from ddp_kit.progress_file import RANKS_CELL, in_order

MOST = 10  # mistakes and parts that are listed
NAMED = 5  # learners in a row of the table
EXERCISE = re.compile(r"P[0-9]|[0-9]{1,2}\.([0-9]{1,2}|[a-z])")


@dataclass
class Tries:
    """One learner's checks of one exercise."""

    checks: int = 0
    passed: bool = False
    until: int = 0  # checks until the first that passed


@dataclass
class Class:
    """What a class has done: by exercise, then by learner."""

    tries: dict[str, dict[str, Tries]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of the checks of an exercise
    mistakes: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)  # parts that did not hold
    unreadable: int = 0  # lines

    @property
    def exercises(self) -> list[str]:
        """The exercises in the order of the course."""
        return sorted(self.tries.keys() - {RANKS_CELL}, key=in_order)

    @property
    def learners(self) -> list[str]:
        """Everybody who has checked an exercise or run a `%%ranks` cell."""
        return sorted({name for tries in self.tries.values() for name in tries})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="with the files *.jsonl")


def run(arguments: argparse.Namespace) -> str:
    """Return the tables."""
    try:
        return "\n\n".join(report(read(arguments.folder)))
    except OSError as error:
        raise CourseError(
            f"{arguments.folder} cannot be read: {error.strerror} ({error.filename})"
        ) from None


def read(folder: Path) -> Class:
    """Return what the files in a folder say.

    A learner is the name in a line, or else the name of its file. Raises CourseError if there is
    no line of a check.
    """
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder: name the one with the files *.jsonl")
    found = Class()
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text("utf-8", errors="replace").splitlines():
            try:
                _add(found, path.stem, json.loads(text))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                found.unreadable += 1
    if not found.tries:
        raise CourseError(
            f"{folder} has no line of a check: DDP_KIT_PROGRESS must name a file in it, "
            "*.jsonl, before a learner's notebook starts"
        )
    return found


def _add(found: Class, file: str, line: dict[str, Any]) -> None:
    exercise, passed, seconds = line["exercise"], line["passed"], float(line["seconds"])
    learner, parts = _shown(line.get("learner") or file, 40), dict(line.get("parts", {}))
    if not (exercise == RANKS_CELL or EXERCISE.fullmatch(exercise)):
        raise ValueError("no check writes such a line")
    tries = found.tries.setdefault(exercise, {}).setdefault(learner, Tries())
    tries.checks += 1
    if passed and not tries.passed:
        tries.passed, tries.until = True, tries.checks
    found.seconds.setdefault(exercise, []).append(seconds)
    if mistake := line.get("mistake"):
        found.mistakes[exercise, _shown(mistake, 1000)] += 1
    missed = (_shown(name, 1000) for name, holds in parts.items() if not holds)
    found.missed.update((exercise, name) for name in missed)


def _shown(text: Any, most: int) -> str:
    """Return text in one line, without what a terminal would obey."""
    plain = "".join(each if each.isprintable() else "?" for each in " ".join(str(text).split()))
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def report(found: Class) -> Iterator[str]:
    header = ["exercise", "learners", "passed", "checks", "seconds", "not yet"]
    rows = [_row(found, exercise) for exercise in found.exercises]
    if rows:
        yield table(f"{count(len(found.learners), 'learner')}", header, rows, align="<")
        yield (
            "checks: until the first that passed, median of those who passed.\n"
            "seconds: one check takes, median."
        )
        title = "The checks of each learner; in brackets, without one that passed"
        yield table(title, ["", *found.exercises], list(_by_learner(found)), align="<")
    if cells := found.tries.get(RANKS_CELL):
        whole = sum(tries.checks for tries in cells.values())
        who = count(len(cells), "learner")
        yield f"{RANKS_CELL}: {count(whole, 'cell')} of {who}."
    if found.mistakes:
        yield "\n".join(["Mistakes made most", *_most(found.mistakes)])
    if found.missed:
        yield "\n".join(["Parts missed most", *_most(found.missed)])
    if found.unreadable:
        yield f"{count(found.unreadable, 'line')} left out: not written by a check."


def _row(found: Class, exercise: str) -> list[str]:
    tries = found.tries[exercise]
    until = [one.until for one in tries.values() if one.passed]
    stuck = sorted(name for name, one in tries.items() if not one.passed)
    more = [f"and {len(stuck) - NAMED} more"] if len(stuck) > NAMED else []
    return [
        exercise,
        str(len(tries)),
        str(len(until)),
        f"{median(until):g}" if until else "",
        f"{median(found.seconds[exercise]):.1f}",
        ", ".join([*stuck[:NAMED], *more]),
    ]


def _by_learner(found: Class) -> Iterator[list[str]]:
    for learner in found.learners:
        row = [learner]
        for exercise in found.exercises:
            tries = found.tries[exercise].get(learner, Tries())
            unpassed = f"({tries.checks})" if tries.checks else ""
            row.append(str(tries.until) if tries.passed else unpassed)
        yield row


def _most(counted: Counter[tuple[str, str]]) -> Iterable[str]:
    for (exercise, text), times in counted.most_common(MOST):
        yield f"{times:4}  {exercise:>8}  {text}"
