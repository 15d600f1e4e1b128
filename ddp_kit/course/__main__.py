"""The command line of `python -m ddp_kit.course`."""

from __future__ import annotations

import argparse
import importlib
import sys

from ddp_kit.errors import CourseError

COMMANDS: dict[str, str] = {
    "copy": "copy the notebooks to a folder, without overwriting what was changed there",
    "list": "list every task with its kind, its lesson and its parts",
    "progress": "show which exercise stops whom, and which mistakes are made most",
    "nbgrader": "write the exercises as nbgrader's source files, with partial credit",
    "otter": "write the exercises with Otter-Grader's test files, with partial credit",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ddp_kit.course")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        module = importlib.import_module(f"ddp_kit.course.{name}")
        subparser = commands.add_parser(name, help=what, description=what)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    try:
        print(parsed.run(parsed))
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
