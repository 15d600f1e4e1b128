"""The command line of `python -m ddp_kit.course`."""

from __future__ import annotations

import argparse
import signal
import sys

from ddp_kit import check
from ddp_kit.course import copy, editions, grading, progress
from ddp_kit.errors import CourseError
from ddp_kit.plot.picture import table


def _list_tasks(arguments: argparse.Namespace) -> str:
    files = editions.files()
    lessons = {file.stem[:2]: file.stem for file in files if len(file.parts) == 1}
    lessons |= {f"P{f.stem[0]}": f.stem[2:] for f in files if f.parts[0] == "projects"}
    exercises = [getattr(check, name).exercise for name in check.__all__ if name != "credit"]
    rows = [
        [each.number, each.kind, lessons[each.number.split(".")[0].zfill(2)], "; ".join(each.parts)]
        for each in exercises
    ]
    return table(f"{len(rows)} tasks", ["number", "kind", "lesson", "parts"], rows, align="<")


COMMANDS = {
    "copy": (
        "copy the notebooks to a folder, without overwriting what was changed there",
        *(copy.add_arguments, copy.run),
    ),
    "list": (
        "list every task with its kind, its lesson and its parts",
        *(lambda parser: None, _list_tasks),
    ),
    "progress": (
        "show which exercise stops whom, and which mistakes are made most",
        *(progress.add_arguments, progress.run),
    ),
    "nbgrader": (
        "write the exercises as nbgrader's source files, with partial credit",
        *(grading.add_arguments, grading.run_nbgrader),
    ),
    "otter": (
        "write the exercises with Otter-Grader's test files, with partial credit",
        *(grading.add_arguments, grading.run_otter),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddp_kit.course")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (what, add_arguments, run) in COMMANDS.items():
        subparser = commands.add_parser(name, help=what, description=what)
        add_arguments(subparser)
        subparser.set_defaults(run=run)
    parsed = parser.parse_args(arguments)
    try:
        print(parsed.run(parsed))
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sys.exit(main())
