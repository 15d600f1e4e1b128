"""The error that a grader raises for a wrong answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ddp_kit as kit


def error_text(grade: Callable, answer: object) -> str:
    """Grade an answer, and return the text of the ExerciseError that it must raise."""
    with pytest.raises(kit.ExerciseError) as caught:
        grade(answer)
    return str(caught.value)
