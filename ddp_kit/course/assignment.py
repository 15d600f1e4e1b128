"""Exercises and solutions as data, from which each grading tool gets its own files."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbformat.validator import iter_validate

from ddp_kit import check
from ddp_kit.check.partial_credit import parts_of
from ddp_kit.course import notebooks
from ddp_kit.error_text import count
from ddp_kit.errors import CourseError

_MISSING = re.compile(r' *raise NotImplementedError\("(Exercise (\d+)\.(\d+): .+)"\)')
_CHECK = re.compile(r"kit\.check\.(exercise_\d+_\d+)\((\w+)\)")


@dataclass
class Gap:
    """The cell of an exercise in which lines are missing.

    before, after: its other lines. task: what is missing, "Exercise 4.1: exchange two chunks".
    lines: the solution.
    """

    before: list[str]
    task: str
    lines: list[str]
    after: list[str]


@dataclass
class Check:
    """The cell that checks an answer.

    name: of the grader, "exercise_4_1". answer: the name of the function or class. parts: of the
    exercise, each of which is worth a point.
    """

    name: str
    answer: str
    parts: list[str]

    @property
    def credit(self) -> str:
        """The expression whose value is the credit of an answer, from 0 to 1."""
        return f"kit.check.credit(kit.check.{self.name}, {self.answer})"


@dataclass
class Cell:
    """One cell of an exercise notebook, without outputs. content: if it is not as all others."""

    raw: dict[str, Any]
    content: Gap | Check | None = None

    def changed(self, source: str | None = None, **metadata: Any) -> dict[str, Any]:
        """Return the cell as JSON, with another source and more metadata."""
        cell = {**self.raw, "metadata": self.raw["metadata"] | metadata}
        return cell if source is None else cell | {"source": source.splitlines(keepends=True)}


@dataclass
class Assignment:
    """The exercises of one lesson. name: of the notebook, without its ending."""

    name: str
    cells: list[Cell]
    notebook: dict[str, Any]

    @property
    def checks(self) -> list[Check]:
        """The checks, in their order."""
        return [cell.content for cell in self.cells if isinstance(cell.content, Check)]

    def to_json(self, cells: list[dict[str, Any]]) -> str:
        """Return the notebook with these cells as the text of a file."""
        return json.dumps(self.notebook | {"cells": cells}, indent=1, ensure_ascii=False) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the commands for grading tools have in common."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    parser.add_argument(
        "--course", metavar="FOLDER", type=Path, help="take the exercises/ and solutions/ in there"
    )


def read(arguments: argparse.Namespace) -> list[Assignment]:
    """Return the exercises of all lessons.

    Raises CourseError if DIR is not empty, if the course's folder is none, or if a notebook has
    been edited so that an exercise cannot be recognized.
    """
    target = arguments.folder
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise CourseError(f"{target} cannot be used: {error.strerror}") from None
    if taken:
        raise CourseError(f"{target} exists and is not an empty folder; name a new one")
    course = arguments.course or notebooks.folder()
    found = sorted((course / "exercises").glob("[0-9]*.ipynb"))
    if not found:
        raise CourseError(f"{course} is not a course: it has no notebooks in exercises/")
    return [_read_assignment(path, course / "solutions" / path.name) for path in found]


def write(files: dict[Path, str]) -> None:
    """Write files, with their folders. Raises CourseError if one cannot be written."""
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        except OSError as error:
            raise CourseError(f"{path} cannot be written: {error.strerror}") from None


def counted(assignments: list[Assignment]) -> str:
    """Return how many assignments there are: "18 assignments are"."""
    return f"{count(len(assignments), 'assignment')} {'is' if len(assignments) == 1 else 'are'}"


def missing(package: str, module: str) -> str:
    """Return a line that says how to install a tool; "" if it is installed.

    The files are written in either case: they may be graded in another environment.
    """
    if importlib.util.find_spec(module):
        return ""
    return f"\n{package} is not installed where the kit is. To install it: pip install {package}"


def _read_assignment(exercises: Path, solutions: Path) -> Assignment:
    notebook, solved = _load(exercises), _load(solutions)
    sources = {cell.get("id"): _source(cell) for cell in solved["cells"]}
    cells, task = [], None
    for raw in notebook["cells"]:
        raw = {**raw, "source": _source(raw).splitlines(keepends=True)}
        if raw["cell_type"] == "code":
            raw |= {"outputs": [], "execution_count": None}
        cell = Cell(raw)
        if raw["cell_type"] != "code":
            raw["source"] = _without_links(_source(raw)).splitlines(keepends=True)
        elif _MISSING.search(_source(raw)):
            cell.content = _gap(_source(raw), sources.get(raw.get("id")), exercises, solutions)
            if task:
                raise CourseError(f"{exercises}: no check follows {task}")
            task = cell.content.task.partition(":")[0]
        elif "kit.check." in _source(raw):
            cell.content, task = _check(_source(raw), task, exercises), None
        cells.append(cell)
    if task or not any(isinstance(cell.content, Check) for cell in cells):
        raise CourseError(f"{exercises}: no check follows {task or 'an exercise'}")
    return Assignment(exercises.stem, cells, notebook)


def _load(path: Path) -> dict[str, Any]:
    try:
        notebook = json.loads(path.read_text("utf-8"))
        ids = [cell.get("id") for cell in notebook["cells"]]
        valid = notebook["nbformat"] == 4 and not any(
            error.validator != "required" or "'id'" not in error.message
            for error in iter_validate(notebook, relax_add_props=True)
        )
    except FileNotFoundError:
        raise CourseError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise CourseError(f"{path} is not a notebook of Jupyter's format 4")
    if None in ids or len(set(ids)) < len(ids):
        raise CourseError(f"{path}: each cell must have an id of its own")
    return notebook


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _gap(stub: str, solution: str | None, exercises: Path, solutions: Path) -> Gap:
    lines, places = stub.splitlines(), []
    for place, line in enumerate(lines):
        if match := _MISSING.fullmatch(line):
            places.append((place, match[1]))
    if len(places) != 1:
        raise CourseError(
            f"{exercises}: a cell must have one line "
            '`raise NotImplementedError("Exercise 4.1: ...")`, and nothing else in that line'
        )
    ((place, task),) = places
    before, after = lines[:place], lines[place + 1 :]
    solved = [] if solution is None else solution.splitlines()
    end = len(solved) - len(after)
    if end <= place or solved[:place] != before or solved[end:] != after:
        number = task.partition(":")[0]
        raise CourseError(
            f"{solutions}: {number} must have the lines of {exercises} in the cell of the same id, "
            "with the missing ones filled in"
        )
    return Gap(before, task, solved[place:end], after)


def _check(source: str, task: str | None, exercises: Path) -> Check:
    match = _CHECK.fullmatch(source.strip())
    name = match[1] if match else ""
    if task and name == f"exercise_{task.removeprefix('Exercise ').replace('.', '_')}":
        if name in check.__all__:
            return Check(name, match[2], parts_of(inspect.unwrap(getattr(check, name))))
        raise CourseError(f"{exercises}: there is no check for {task}")
    if match and not task:
        number = name.removeprefix("exercise_").replace("_", ".")
        raise CourseError(
            f'{exercises}: no cell with `raise NotImplementedError("Exercise {number}: ...")` is '
            f"above the check of Exercise {number}"
        )
    wanted = "`kit.check.exercise_4_1(answer)`, below the cell of its exercise"
    raise CourseError(f"{exercises}: a check must be one line such as {wanted}")


def _without_links(text: str) -> str:
    """Return prose without links to the lessons, and without the paragraph on the solutions."""
    kept = [part for part in text.split("\n\n") if "../solutions/" not in part]
    return re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", "\n\n".join(kept))
