"""Wrong answers to the exercises of lesson 17, and the errors that the learner gets."""

from __future__ import annotations

import pytest
from answers import assert_mistake, mistake, solved

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")
interleaved = solved("17.4")


@mistake(
    "17.4",
    "otherwise",
    "should hold '0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 ...' in the order (2B3: (\"B\", 3, 2)) but holds "
    "'0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 ...', where number 22 is 0B5 instead of 0B4\n",
)
def test_an_interleaved_order_that_is_wrong_late(rank, p, v, m):
    order = interleaved(rank, p, v, m)
    return order if m < 6 else [*order[:-2], order[-1], order[-2]]


def in_order(*rows):
    """Return an answer to 17.12: a row for each rank, with `F0` for ("F", 0)."""
    return lambda: [[(step[0], int(step[1:])) for step in row.split()] for row in rows]


def at_once(together):
    """Return a row in which so many micro-batches go forward, and then all the way back."""
    groups = [range(first, min(first + together, 8)) for first in range(0, 8, together)]
    steps = [[f"{kind}{i}" for i in g for kind in "F"] for g in groups]
    backs = [[f"{kind}{i}" for i in g for kind in "IW"] for g in groups]
    return " ".join(" ".join(f + b) for f, b in zip(steps, backs, strict=True))


WARM_UP = (3, 3, 2, 1)


def halves(most):
    """Return 1F1B's row for a rank that holds at most so many, with I and W one after the other."""
    row = [f"F{i}" for i in range(most)]
    for i in range(8):
        row += [f"I{i}", f"W{i}", *([f"F{i + most}"] if i + most < 8 else [])]
    return " ".join(row)


def test_each_goal_of_a_schedule_is_worth_a_point(capsys):
    check = kit.check.exercise_17_12
    credit = check(in_order(*map(halves, WARM_UP)))
    assert "Exercise 17.12: ★☆☆ 38 units of time; the best" in capsys.readouterr().out
    assert list(credit.parts.values()) == [True, False, False]
    assert kit.check.credit(check, solved("17.12")) == 1
    assert kit.check.credit(check, in_order(*[at_once(1)] * 4)) == 0


@pytest.mark.parametrize(
    ("rows", "name", "fact"),
    [
        ([at_once(1)] * 4, "no goal", "right, but 72 units of time where at most 40"),
        ([at_once(8)] * 4, "too many held", "rank 0 holds 4 micro-batches when it begins F3"),
        (
            [at_once(3).replace("I0 W0", "W0 I0")] * 4,
            "halves swapped",
            "rank 0 has W0 before I0",
        ),
        ([at_once(3)] * 3, "other steps", "it should return 4 lists of steps"),
        ([at_once(3)] * 3 + ["F0"], "other steps", "rank 3 has 1 steps; wrong: F1 F2"),
        (
            [halves(1), *[halves(2)] * 3],
            "never ends",
            "rank 0 waits for I0 of stage 1",
        ),
    ],
)
def test_a_schedule(rows, name, fact):
    assert_mistake(kit.check.exercise_17_12, in_order(*rows), name, fact)


@mistake("17.12", "other steps", "it should return 4 lists")
def test_a_number_for_a_schedule():
    return 7
