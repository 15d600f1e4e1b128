"""`progress FOLDER`: which exercise stops whom, and which mistakes are made most.

FOLDER has the files that `DDP_KIT_PROGRESS` named, one or many; ddp_kit/progress_file.py writes
them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ddp_kit.error_text import count
from ddp_kit.errors import CourseError
from ddp_kit.plot import Picture
from ddp_kit.plot.picture import open_picture, table
from ddp_kit.plot.style import PAPER, box, write
from ddp_kit.progress_file import RANKS_CELL, in_order

MOST = 10  # mistakes and parts that are listed
NAMED = 5  # learners in a row of the table
PICTURE = "progress.png"
EXERCISE = re.compile(r"P[0-9]|[0-9]{1,2}\.([0-9]{1,2}|[a-z])")
CELL, ROW, HEAD, KEY = 0.36, 0.22, 0.6, 0.35  # inches
# Colours that no rank has; the fill of a box, its edge, and the text in the key.
PASSED = "#3c7d78", "#a6a6a6", "passed"
NOT_YET = "#d9d9d9", "#a6a6a6", "not yet"


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
    """Return the tables; draw FOLDER/progress.png."""
    folder = arguments.folder
    try:
        found = read(folder)
        path = folder / PICTURE
        if found.exercises:
            with warnings.catch_warnings():  # about letters of a name that no font has
                warnings.filterwarnings("ignore", "Glyph ")
                path.write_bytes(draw(found)._repr_png_())
    except OSError as error:
        raise CourseError(
            f"{folder} cannot be read, or no picture written there: {error.strerror} "
            f"({error.filename})"
        ) from None
    drawn = [f"The picture is {path}."] if found.exercises else []
    return "\n\n".join([*report(found), *drawn])


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
    if not (exercise == RANKS_CELL or EXERCISE.fullmatch(exercise)) or not math.isfinite(seconds):
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
    """Return text in one line, without what a terminal would obey and a picture cannot draw."""
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


def _most(counted: Counter[tuple[str, str]]) -> Iterable[str]:
    for (exercise, text), times in counted.most_common(MOST):
        yield f"{times:4}  {exercise:>8}  {text}"


def draw(found: Class) -> Picture:
    """Return a picture: a row for each learner, a column for each exercise, the checks in it."""
    exercises, learners = found.exercises, found.learners
    title = "How many checks each learner needed"
    left = 0.2 + 0.085 * max(map(len, learners))
    width = max(6.4, left + CELL * len(exercises) + 0.2)
    bottom = HEAD + ROW * len(learners)
    caption = "The number in a box counts the checks until the first that passed, or all so far."
    picture, sheet = open_picture(
        title, "\n".join([title, *report(found)]), width, bottom + KEY + 0.1, caption
    )
    for column, exercise in enumerate(exercises):
        x = left + CELL * (column + 0.5)
        write(sheet, x, HEAD - 0.1, exercise, 8.5, ha="center")
    for row, learner in enumerate(learners):
        y = HEAD + ROW * row
        write(sheet, left - 0.1, y + ROW / 2, learner, 8.5, ha="right")
        for column, exercise in enumerate(exercises):
            if tries := found.tries[exercise].get(learner):
                fill, edge, _ = PASSED if tries.passed else NOT_YET
                number = str(tries.until if tries.passed else tries.checks)
                x = left + CELL * column
                box(sheet, x + 0.02, y + 0.02, CELL - 0.04, ROW - 0.04, fill, edge, number, 8.5)
    x = 0.02
    for fill, edge, text in (PASSED, NOT_YET, (PAPER, PAPER, "empty: no check")):
        box(sheet, x, bottom + 0.1, 0.26, 0.16, fill, edge)
        write(sheet, x + 0.34, bottom + 0.18, text, 8.5)
        x += 0.55 + 0.075 * len(text)
    return picture
