"""`list`: a line for every task: its number, kind, lesson and parts."""

from __future__ import annotations

import argparse

from ddp_kit import check
from ddp_kit.course import editions
from ddp_kit.plot.picture import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command: it has none."""


def run(arguments: argparse.Namespace) -> str:
    """Return the table of all tasks."""
    files = editions.files()
    lessons = {file.stem[:2]: file.stem for file in files if len(file.parts) == 1}
    lessons |= {f"P{f.stem[0]}": f.stem[2:] for f in files if f.parts[0] == "projects"}
    exercises = [getattr(check, name).exercise for name in check.__all__ if name != "credit"]
    rows = [
        [each.number, each.kind, lessons[each.number.split(".")[0].zfill(2)], "; ".join(each.parts)]
        for each in exercises
    ]
    return table(f"{len(rows)} tasks", ["number", "kind", "lesson", "parts"], rows, align="<")
