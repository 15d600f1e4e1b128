"""`python -m ddp_kit.course nbgrader DIR`: the exercises as nbgrader's source files."""

from __future__ import annotations

import argparse
from typing import Any

from nbformat import NotebookNode

from ddp_kit.course import editions
from ddp_kit.course.assignment import Assignment, add_arguments, counted, missing, read, write
from ddp_kit.course.cells import hunted, tasks

__all__ = ["add_arguments", "run"]

_CONFIG = """c = get_config()
c.CourseDirectory.course_id = "ddp_kit"
c.Execute.timeout = 120  # seconds of a cell; a check takes 20, and its ranks may start slowly
"""


def run(arguments: argparse.Namespace) -> str:
    """Write nbgrader_config.py and an assignment for each lesson, with locked tests and points."""
    assignments, folder = read(arguments), arguments.folder
    files = {folder / "nbgrader_config.py": _CONFIG}
    for each in assignments:
        path = folder / "source" / each.name / f"{each.name}.ipynb"
        files[path] = _edition(each)
    write(files)
    return (
        f"{counted(assignments)} in {folder}/source. "
        f"Next, in {folder}: nbgrader generate_assignment {assignments[0].name}"
        f"{missing('nbgrader', 'nbgrader')}"
    )


def _edition(assignment: Assignment) -> str:
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
