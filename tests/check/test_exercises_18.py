"""Wrong answers to the exercises of lesson 18, and the errors that the learner gets."""

from __future__ import annotations

import pytest
from answers import assert_mistake, mistake, solved

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def by_rank(rank_of):
    """Return an answer to 18.10 that puts chunk i on rank_of(i)."""
    return lambda: [[i for i in range(32) if rank_of(i) == rank] for rank in range(8)]


def test_each_goal_of_an_assignment_is_worth_a_point(capsys):
    check = kit.check.exercise_18_10
    credit = check(by_rank(lambda i: i % 8))
    assert "Exercise 18.10: ★☆☆ 54 units of time; the best" in capsys.readouterr().out
    assert list(credit.parts.values()) == [True, False, False]
    assert kit.check.credit(check, solved("18.10")) == 1
    assert kit.check.credit(check, by_rank(lambda i: i // 4)) == 0


@pytest.mark.parametrize(
    ("rank_of", "name", "fact"),
    [
        (lambda i: min(i // 2, 15 - i // 2), "no goal", "right, but 88 units of time"),
        (lambda i: i % 9, "not each once", "not exactly once: 8, 17, 26"),
        (lambda i: min(i // 2, 7), "too many chunks", "rank 0 has 2"),
    ],
)
def test_an_assignment(rank_of, name, fact):
    assert_mistake(kit.check.exercise_18_10, by_rank(rank_of), name, fact)


@mistake("18.10", "other lists", "it should return a list of 8 lists")
def test_a_number_for_an_assignment():
    return 7
