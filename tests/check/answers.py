"""Wrong answers, and the errors that graders raise for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import find, solutions


def check_of(number: str) -> Callable:
    """Return the check of an exercise."""
    return getattr(kit.check, f"exercise_{number.replace('.', '_')}")


def solved(number: str, changes: Mapping[str, str] | None = None) -> Callable:
    """Return the solution of an exercise, with changes: what is there instead of what it has."""
    program = solutions()[number]["program"]
    for right, wrong in (changes or {}).items():
        assert program.count(right) == 1, right
        program = program.replace(right, wrong)
    return defined(number, program, check_of(number).exercise.form.partition("(")[0])


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
            assert_mistake(check_of(exercise), answer, name, *facts)

        test.__name__ = test.__qualname__ = answer.__name__
        return test

    return as_test
