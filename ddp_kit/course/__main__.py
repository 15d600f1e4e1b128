"""The command line of `python -m ddp_kit.course`."""

from __future__ import annotations

import argparse
import sys

from ddp_kit.course import copy, grading, progress
from ddp_kit.course import list as list_tasks
from ddp_kit.errors import CourseError

COMMANDS = {
    "copy": (
        "copy the notebooks to a folder, without overwriting what was changed there",
        *(copy.add_arguments, copy.run),
    ),
    "list": (
        "list every task with its kind, its lesson and its parts",
        *(list_tasks.add_arguments, list_tasks.run),
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
    """Run one command; return the exit status."""
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
    sys.exit(main())
