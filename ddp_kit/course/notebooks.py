"""Where the course's notebooks are, and which files belong to it."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_kit.errors import CourseError

# In a checkout this is a link to notebooks/, and a wheel has the files themselves.
_HANDOUT = Path(__file__).with_name("handout")
# A learner's own files may be beside them. pyproject.toml has the same patterns.
_PATTERNS = (
    "[0-9][0-9]_*.ipynb",
    "exercises/[0-9][0-9]_*.ipynb",
    "solutions/[0-9][0-9]_*.ipynb",
    "scripts/[0-9][0-9]_*.py",
    "scripts/train.py",
    "scripts/job.sh",
    "scripts/two_hosts.sh",
)


def folder() -> Path:
    """Return the folder that has the lessons, exercises/, solutions/ and scripts/.

    Raises CourseError if this installation has none.
    """
    if not (_HANDOUT / "exercises").is_dir():
        raise CourseError(
            "this installation of ddp_kit has no notebooks: install it from its wheel, or from a "
            "checkout on a file system with symbolic links"
        )
    return _HANDOUT.resolve()


def files() -> list[Path]:
    """Return the course's files, as sorted paths inside its folder."""
    course = folder()
    found = (path for pattern in _PATTERNS for path in course.glob(pattern))
    return sorted(path.relative_to(course) for path in found)


def write(path: Path, content: bytes) -> bool:
    """Write a file as a whole or not at all; return whether it changed."""
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return True
