"""`python -m ddp_kit.course nbgrader DIR`: the exercises as nbgrader's source files."""

from __future__ import annotations

import argparse
from typing import Any

from ddp_kit.course.assignment import Cell, Check, Gap, add_arguments, counted, missing, read, write

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
        files[path] = each.to_json([_cell(cell) for cell in each.cells])
    write(files)
    return (
        f"{counted(assignments)} in {folder}/source. "
        f"Next, in {folder}: nbgrader generate_assignment {assignments[0].name}"
        f"{missing('nbgrader', 'nbgrader')}"
    )


def _cell(cell: Cell) -> dict[str, Any]:
    match cell.content:
        case Gap() as gap:
            indent = gap.lines[0][: -len(gap.lines[0].lstrip())]
            marked = [
                f"{indent}# {gap.task}",
                f"{indent}### BEGIN SOLUTION",
                *gap.lines,
                f"{indent}### END SOLUTION",
            ]
            source = "\n".join([*gap.before, *marked, *gap.after])
            return cell.changed(source, nbgrader=_metadata(cell, solution=True))
        case Check() as check:
            # nbgrader takes the number that a test shows as its points, and a text on stderr as 0.
            points = len(check.parts)
            metadata = _metadata(cell, grade=True, locked=True) | {"points": points}
            return cell.changed(f"{points} * {check.credit}", nbgrader=metadata, tags=[])
    return cell.changed(nbgrader=_metadata(cell, locked=True))


def _metadata(cell: Cell, **true: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("grade", "solution", "locked", "task"), False) | true
    return {
        "schema_version": 3,
        "grade_id": cell.raw["id"],
        "cell_type": cell.raw["cell_type"],
        **flags,
    }
