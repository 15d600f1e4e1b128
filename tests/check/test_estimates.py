"""An estimate is right within its tolerance, and each mistake with another number is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from answers import assert_mistake, error_text

import ddp_kit as kit
from ddp_kit.check.hints import hints

CHECKS = [getattr(kit.check, name) for name in kit.check.__all__ if name != "credit"]
ESTIMATES = {check.exercise.number: check for check in CHECKS if check.exercise.kind == "estimate"}


@pytest.mark.parametrize("number", ESTIMATES)
def test_numbers_near_the_answer_are_right_and_mistakes_are_found(number, capsys):
    check = ESTIMATES[number]
    estimate = check.exercise
    for factor in (1, 1 + 0.9 * estimate.within, 1 - 0.9 * estimate.within):
        assert check(factor * estimate.answer) == 1
    assert capsys.readouterr().out.count(f"Exercise {number}: right, ") == 3
    mistakes = {name.partition(" ")[2] for name in hints() if name.startswith(f"{number} ")}
    assert mistakes == {*estimate.wrong, "other"}
    for name, value in estimate.wrong.items():
        size = "small" if value < estimate.answer else "large"
        assert_mistake(check, value, name, f"exercise {number}: ", f" is too {size}")
    assert_mistake(check, -1.0, "other")
    assert kit.check.credit(check, -1.0) == 0


@pytest.mark.parametrize("wrong", [True, "28 ms", None, float("nan")])
def test_what_is_no_number_is_refused(wrong):
    text = error_text(kit.check.exercise_12_5, wrong)
    assert text.startswith("exercise 12.5: the answer is a number, got ")


def test_dots_are_not_solved_yet():
    with pytest.raises(NotImplementedError, match=r"Exercise 12\.5: replace the dots by a number"):
        kit.check.exercise_12_5(...)
    assert kit.check.credit(kit.check.exercise_12_5, ...) == 0


@pytest.mark.parametrize(
    ("number", "text"),
    [(123_456, "123,000"), (2500.0, "2,500"), (3.14159, "3.14"), (numpy.int64(2500), "2,500")],
)
def test_a_number_is_shown_in_three_digits_without_a_power_of_ten(number, text):
    assert f"exercise 12.5: {text} ms is too " in error_text(kit.check.exercise_12_5, number)


def test_a_number_in_another_unit_is_asked_for_its_unit_at_the_second_try():
    check = kit.check.exercise_12_7
    answer = check.exercise.answer / 100
    assert_mistake(check, answer, "other unit")
    for step, asked in ((1, False), (2, True)):
        with pytest.raises(kit.ExerciseError) as caught:
            check(answer, hint=step)
        assert ("In which unit is your number" in str(caught.value)) is asked


@pytest.mark.parametrize("number", ESTIMATES)
def test_the_notebook_names_the_tolerance(number):
    lesson = number.split(".")[0].zfill(2)
    (path,) = (Path(__file__).parents[2] / "notebooks/exercises").glob(f"{lesson}_*.ipynb")
    texts = ["".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"]]
    (check,) = (
        n for n, text in enumerate(texts) if f"exercise_{number.replace('.', '_')}(" in text
    )
    assert f"Within {ESTIMATES[number].exercise.within:.0%}".replace("%", " %") in texts[check - 1]
