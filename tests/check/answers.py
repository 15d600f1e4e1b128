"""The errors that graders raise for wrong answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ddp_kit as kit
from ddp_kit.check.hints import find


def error_text(grade: Callable, answer: object, hint: int = 1) -> str:
    """Grade a wrong answer, and return the text of its error. hint: the step that is asked for."""
    with pytest.raises(kit.ExerciseError) as caught:
        grade(answer, hint=hint)
    return str(caught.value)


def assert_mistake(grade: Callable, answer: object, mistake: str, *facts: str) -> None:
    """Grade a wrong answer: the named mistake must be found, and all facts be in the message.

    mistake: its name in hints.ini, without the exercise; "" if it has none.
    """
    with pytest.raises(kit.ExerciseError) as caught:
        grade(answer)
    found = find(grade.exercise.number, mistake).mistake if mistake else ""
    assert caught.value.mistake == found
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def mistake(exercise: str, name: str, *facts: str) -> Callable[[Callable], Callable[[], None]]:
    """Turn a wrong answer into a test that its check finds this mistake, and says these facts."""

    def as_test(answer: Callable) -> Callable[[], None]:
        def test() -> None:
            grade = getattr(kit.check, f"exercise_{exercise.replace('.', '_')}")
            assert_mistake(grade, answer, name, *facts)

        test.__name__ = test.__qualname__ = answer.__name__
        return test

    return as_test
