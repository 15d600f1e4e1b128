"""Exercises and solutions as data, from which each grading tool gets its own files."""

from __future__ import annotations

import argparse
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from ddp_kit import check
from ddp_kit.course import editions, notebooks
from ddp_kit.course.cells import hunted, may_fail, tags, tasks
from ddp_kit.error_text import count
from ddp_kit.errors import CourseError

_CHECK = re.compile(r"kit\.check\.(exercise_\d+_\d+)\((\w+)\)")


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
class Assignment:
    """The exercises of one lesson.

    name: of the notebook, without its ending. notebook: solved, with marks and without outputs; but
    the programs of hunts are broken. checks: by the id of their cells, in their order.
    """

    name: str
    notebook: NotebookNode
    checks: dict[str, Check]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the commands for grading tools have in common."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    parser.add_argument(
        "--course", metavar="FOLDER", type=Path, help="take the solved exercises in its solutions/"
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
    found = sorted((course / "solutions").glob("[0-9]*.ipynb"))
    if not found:
        raise CourseError(f"{course} is not a course: it has no notebooks in solutions/")
    return [_read_assignment(path) for path in found]


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


def _read_assignment(path: Path) -> Assignment:
    notebook = editions.read(path)
    notebook.cells = [
        cell
        for cell in editions.without(notebook, "solution")
        if "exercise" not in tags(cell) or hunted(cell.source)
    ]
    checks, task = {}, ""
    for cell in notebook.cells:
        cell.metadata = {"tags": ["raises-exception"]} if may_fail(cell) else {}
        if cell.cell_type == "markdown":  # without links to the lessons
            cell.source = re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", cell.source)
        elif tasks(cell.source) or hunted(cell.source):
            if task:
                raise CourseError(f"{path}: no check follows {task}")
            number = hunted(cell.source)
            task = f"Exercise {number}" if number else tasks(cell.source)[0].partition(":")[0]
        elif "kit.check." in cell.source:
            checks[cell.id], task = _check(cell.source, task, path), ""
    if task or not checks:
        raise CourseError(f"{path}: no check follows {task or 'an exercise'}")
    return Assignment(path.stem, notebook, checks)


def _check(source: str, task: str, path: Path) -> Check:
    match = _CHECK.fullmatch(source.strip())
    name = match[1] if match else ""
    if task and name == f"exercise_{task.removeprefix('Exercise ').replace('.', '_')}":
        if name in check.__all__:
            return Check(name, match[2], getattr(check, name).exercise.parts)
        raise CourseError(f"{path}: there is no check for {task}")
    if match and not task:
        number = name.removeprefix("exercise_").replace("_", ".")
        raise CourseError(
            f"{path}: no cell with `# Exercise {number}: ...` above a solution between marks "
            f"precedes the check of Exercise {number}"
        )
    wanted = "`kit.check.exercise_4_1(answer)`, below the cell of its exercise"
    raise CourseError(f"{path}: a check must be one line such as {wanted}")
