"""`copy DIR`: put the notebooks where a learner wants them, never over a changed file."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path

from ddp_kit.course import editions
from ddp_kit.error_text import count
from ddp_kit.errors import CourseError

COPIED = ".ddp_kit.json"  # in DIR: the checksum of each file as it was copied


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to copy them")
    parser.add_argument("--no-solutions", action="store_true", help="leave out solutions/")


def run(arguments: argparse.Namespace) -> str:
    """Copy the course; return what was copied, and which changed files were kept."""
    folder = arguments.folder
    if Path(os.path.realpath(folder)).is_relative_to(editions.folder()):
        raise CourseError(f"{folder} is where the course itself is: name another folder")
    try:
        copied, updated, kept = copy(folder, solutions=not arguments.no_solutions)
    except OSError as error:
        raise CourseError(
            f"the notebooks cannot be copied to {folder}: {error.strerror} ({error.filename})"
        ) from None
    lines = [f"{count(copied, 'file')} copied to {folder}, {updated} updated, {len(kept)} kept."]
    if kept:
        lines += ["Kept, because they were changed there:", *(f"  {file}" for file in kept)]
        lines += ["To get the course's own version, rename yours and copy again."]
    return "\n".join(lines)


def copy(target: Path, solutions: bool = True) -> tuple[int, int, list[Path]]:
    """Copy the course's files; return how many are new, how many were updated, and which kept.

    A file is updated if it still is what was copied before. It is kept if it was changed since,
    or if it was not copied by this command. A file that is up to date counts as none of these.

    Raises OSError if a file cannot be read or written.
    """
    course, checksums = editions.folder(), _read(target / COPIED)
    copied, updated, kept = 0, 0, []
    for file in editions.files():
        if file.parts[0] == "solutions" and not solutions:
            continue
        new, there = _edition(course, file), target / file
        old = there.read_bytes() if os.path.lexists(there) else None
        if old is None or (old != new and _checksum(old) == checksums.get(file.as_posix())):
            editions.write(there, new)
            copied, updated = copied + (old is None), updated + (old is not None)
        elif old != new:
            kept.append(file)
            continue
        checksums[file.as_posix()] = _checksum(new)
    editions.write(target / COPIED, json.dumps(checksums, indent=1).encode())
    return copied, updated, kept


def _edition(course: Path, file: Path) -> bytes:
    """Return a file of the course as a learner gets it."""
    if file.suffix != ".ipynb" or file.parts[0] == "exercises":
        return (course / file).read_bytes()
    make = editions.solutions if file.parts[0] == "solutions" else editions.lesson
    return make(editions.read(course / file)).encode()


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> dict[str, str]:
    """Return the checksums of an earlier copy; none if there is none, or if it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
