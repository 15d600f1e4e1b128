"""`python -m ddp_kit.course otter DIR`: the exercises with Otter-Grader's test files."""

from __future__ import annotations

import argparse
from pathlib import Path

from ddp_kit.course import editions
from ddp_kit.course.assignment import (
    Assignment,
    Check,
    add_arguments,
    counted,
    missing,
    read,
    write,
)
from ddp_kit.course.cells import unsolved

__all__ = ["add_arguments", "run"]

_TEST = '''"""Grades {name}: each part that holds is worth a point."""

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
_PART = """

@test_case(name={part!r}, points=1)
def part_{number}({answer}):
    check({part!r}, {answer})
"""


def run(arguments: argparse.Namespace) -> str:
    """Write a folder for each lesson: the notebook for learners, and tests/ with the points."""
    assignments, folder = read(arguments), arguments.folder
    files: dict[Path, str] = {}
    for each in assignments:
        own = folder / each.name
        files[own / f"{each.name}.ipynb"] = _edition(each)
        files |= {
            own / "tests" / f"{check.name}.py": _test(check) for check in each.checks.values()
        }
    write(files)
    return (
        f"{counted(assignments)} in {folder}. "
        f"Next, in {folder}/{assignments[0].name}: otter generate -t tests"
        f"{missing('otter-grader', 'otter')}"
    )


def _edition(assignment: Assignment) -> str:
    """Return the notebook for learners, where Otter runs the tests instead of the checks."""
    for cell in assignment.notebook.cells:
        cell.source = unsolved(cell.source)
        if cell.id in assignment.checks:
            cell.metadata["tags"] = ["otter_ignore", "raises-exception"]
    return editions.text_of(assignment.notebook, assignment.notebook.cells)


def _test(check: Check) -> str:
    names = {"name": check.name, "answer": check.answer, "credit": check.credit}
    parts = [
        _PART.format(part=part, number=number, answer=check.answer)
        for number, part in enumerate(check.parts, 1)
    ]
    return "".join([_TEST.format(**names), *parts])
