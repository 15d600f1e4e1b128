"""The exercises as files of grading tools, with partial credit: `nbgrader DIR` and `otter DIR`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from ddp_kit import check
from ddp_kit.course import editions
from ddp_kit.course.cells import hunted, may_fail, number_of, tags, tasks, unsolved
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
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    parser.add_argument(
        "--course", metavar="FOLDER", type=Path, help="take the solved exercises in its solutions/"
    )


def _read(arguments: argparse.Namespace) -> list[Assignment]:
    """Return the exercises of all lessons.

    Raises CourseError if DIR is not empty, if the course's folder is none, or if a notebook has
    been edited so that an exercise cannot be recognized.
    """
    target, course = arguments.folder, arguments.course or editions.folder()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CourseError(f"{target} exists and is not an empty folder; name a new one")
    found = sorted((course / "solutions").glob("[0-9]*.ipynb"))
    if not found:
        raise CourseError(f"{course} is not a course: it has no notebooks in solutions/")
    return [_read_assignment(path) for path in found]


def _write(files: dict[Path, str]) -> None:
    """Write files, with their folders. Raises CourseError if one cannot be written."""
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise CourseError(f"{error.filename} cannot be written: {error.strerror}") from None


def _report(assignments: list[Assignment], where: str, next_call: str) -> str:
    are = "is" if len(assignments) == 1 else "are"
    return f"{count(len(assignments), 'assignment')} {are} in {where}. Next, in {next_call}"


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
        elif number := number_of(cell.source):
            if task:
                raise CourseError(f"{path}: no check follows {task}")
            task = f"Exercise {number}"
        elif "kit.check." in cell.source:
            checks[cell.id], task = _check(cell.source, task, path), ""
    if task or not checks:
        raise CourseError(f"{path}: no check follows {task or 'an exercise'}")
    return Assignment(path.stem, notebook, checks)


def _check(source: str, task: str, path: Path) -> Check:
    match = _CHECK.fullmatch(source.strip())
    name = f"exercise_{task.removeprefix('Exercise ').replace('.', '_')}"
    if match is None or match[1] != name or name not in check.__all__:
        raise CourseError(
            f"{path}: a check must be one line such as `kit.check.exercise_4_1(answer)`, below the "
            f"cell of its exercise; {source.strip()!r} is not, below {task or 'no exercise'}"
        )
    return Check(name, match[2], getattr(check, name).exercise.parts)


# nbgrader

_NBGRADER_CONFIG = """c = get_config()
c.CourseDirectory.course_id = "ddp_kit"
c.Execute.timeout = 120  # seconds of a cell; a check takes 20, and its ranks may start slowly
"""


def run_nbgrader(arguments: argparse.Namespace) -> str:
    """Write nbgrader_config.py and an assignment for each lesson, with locked tests and points."""
    assignments, folder = _read(arguments), arguments.folder
    files = {folder / "nbgrader_config.py": _NBGRADER_CONFIG}
    for each in assignments:
        path = folder / "source" / each.name / f"{each.name}.ipynb"
        files[path] = _nbgrader_edition(each)
    _write(files)
    call = f"{folder}: nbgrader generate_assignment {assignments[0].name}"
    return _report(assignments, f"{folder}/source", call)


def _nbgrader_edition(assignment: Assignment) -> str:
    for cell in assignment.notebook.cells:
        check = assignment.checks.get(cell.id)
        if check:
            # nbgrader takes the number that a test shows as its points, and a text on stderr as 0.
            cell.source = f"{len(check.parts)} * {check.credit}"
            metadata = _metadata(cell, grade=True, locked=True) | {"points": len(check.parts)}
        elif cell.cell_type == "code" and tasks(cell.source):
            metadata = _metadata(cell, solution=True)
        elif hunted(cell.source):
            continue  # nbgrader keeps what learners change in a cell that is none of its own
        else:
            metadata = _metadata(cell, locked=True)
        cell.metadata["nbgrader"] = metadata
    return editions.text_of(assignment.notebook, assignment.notebook.cells)


def _metadata(cell: NotebookNode, **true: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("grade", "solution", "locked", "task"), False) | true
    return {"schema_version": 3, "grade_id": cell.id, "cell_type": cell.cell_type, **flags}


# Otter-Grader

_OTTER_TEST = '''"""Grades {name}: each part that holds is worth a point."""

from otter.test_files import test_case

import ddp_kit as kit

OK_FORMAT = False
name = "{name}"
found = None


def check(part, {answer}):
    global found
    if found is None:
        found = {credit}
    assert found.parts.get(part), found.wrong.get(part, "holds only if all results are right")
'''
_OTTER_PART = """

@test_case(name={part!r}, points=1)
def part_{number}({answer}):
    check({part!r}, {answer})
"""


def run_otter(arguments: argparse.Namespace) -> str:
    """Write a folder for each lesson: the notebook for learners, and tests/ with the points."""
    assignments, folder = _read(arguments), arguments.folder
    files: dict[Path, str] = {}
    for each in assignments:
        own = folder / each.name
        files[own / f"{each.name}.ipynb"] = _otter_edition(each)
        files |= {
            own / "tests" / f"{check.name}.py": _otter_test(check) for check in each.checks.values()
        }
    _write(files)
    call = f"{folder}/{assignments[0].name}: otter generate -t tests"
    return _report(assignments, str(folder), call)


def _otter_edition(assignment: Assignment) -> str:
    """Return the notebook for learners, where Otter runs the tests instead of the checks.

    Otter runs the test that a cell names after that cell, and so before another exercise defines
    the same name: all hunts are a function `train`.
    """
    before = None
    for cell in assignment.notebook.cells:
        cell.source = unsolved(cell.source)
        if check := assignment.checks.get(cell.id):
            cell.metadata["tags"] = ["otter_ignore", "raises-exception"]
            before.metadata["otter"] = {"tests": [check.name]}
        before = cell
    return editions.text_of(assignment.notebook, assignment.notebook.cells)


def _otter_test(check: Check) -> str:
    names = {"name": check.name, "answer": check.answer, "credit": check.credit}
    parts = [
        _OTTER_PART.format(part=part, number=number, answer=check.answer)
        for number, part in enumerate(check.parts, 1)
    ]
    return "".join([_OTTER_TEST.format(**names), *parts])
