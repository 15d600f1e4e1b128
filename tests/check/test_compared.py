"""Answers that are compared with the solution: each known mistake is found by its program."""

from __future__ import annotations

import pytest
import torch
from answers import assert_mistake

import ddp_kit as kit
from ddp_kit.check.compared import defined, programs
from ddp_kit.check.hints import hints, solutions

CHECKS = {
    check.exercise.number: check
    for check in (getattr(kit.check, name) for name in kit.check.__all__ if name != "credit")
}
CHANGED = [
    tuple(name.split(" ", 1))
    for name, hint in hints().items()
    if hint.replace and name[0].isdigit()
]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("number", "mistake"), CHANGED)
def test_a_changed_solution_makes_its_mistake(number, mistake):
    hint = hints()[f"{number} {mistake}"]
    assert solutions()[number]["program"].count(hint.replace) == 1
    check = CHECKS[number]
    name = check.exercise.form.partition("(")[0]
    assert_mistake(check, defined(number, programs(number)[mistake], name), mistake)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("number", "mistake", "right", "wrong"),
    [
        ("2.a", "reduced to one", "dist.all_reduce(sums)", "dist.reduce(sums, dst=0)"),
        ("9.b", "reduced to one", "dist.all_reduce(total)", "dist.reduce(total, dst=0)"),
        ("1.a", "another form", "return received.item()", "return received"),
    ],
)
def test_a_mistake_of_many_exercises_is_found(number, mistake, right, wrong):
    check, program = CHECKS[number], solutions()[number]["program"].replace(right, wrong)
    answer = defined(number, program, check.exercise.form.partition("(")[0])
    assert_mistake(check, answer, mistake)


def test_a_result_that_no_known_mistake_has_gets_a_question():
    assert_mistake(kit.check.exercise_4_d, lambda n, alpha, beta: -1.0, "unknown")


@pytest.mark.usefixtures("forked_ranks")
def test_an_answer_that_sends_nothing_is_refused():
    scores = torch.tensor([0.0, 3.0, 1.0, 2.0, 5.0, 4.0])
    values = torch.tensor([5.0, 1.0, 4.0, 2.0, 0.0, 3.0])

    def train(rank, world_size):
        return scores.softmax(0) @ values

    fact = "right, but no rank sent anything to another"
    assert_mistake(kit.check.exercise_18_8, train, "nothing sent", fact)
