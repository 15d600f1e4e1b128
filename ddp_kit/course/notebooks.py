"""Where the course's notebooks are."""

from __future__ import annotations

from pathlib import Path

from ddp_kit.errors import CourseError


def folder() -> Path:
    """Return the folder that contains the lessons, exercises/ and solutions/.

    Raises CourseError if it is not there.
    """
    found = Path(__file__).parents[2] / "notebooks"
    if not (found / "exercises").is_dir():
        raise CourseError(f"the course's notebooks are not in {found}; --course names their folder")
    return found
