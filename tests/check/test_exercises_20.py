"""Wrong answers to the exercises of lesson 20, and the errors that the learner gets."""

from __future__ import annotations

import pytest
from answers import assert_mistake

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.parametrize("stage", [True, 0.0, "0"])
def test_a_stage_of_another_type_is_refused(stage):
    with pytest.raises(kit.ExerciseError, match="it should return 0 but returns"):
        kit.check.exercise_20_2(lambda *_: stage)


FORWARD = [f"gather {layer}" for layer in range(6)]


def backward(*again, ahead=0):
    """Return an order: each layer in `again` is gathered before the reduction of so many before."""
    order = [f"reduce {layer}" for layer in reversed(range(6))]
    for layer in again:
        order.insert(max(0, order.index(f"reduce {layer}") - ahead), f"gather {layer}")
    return order


@pytest.mark.parametrize(
    ("again", "ahead", "stars", "score"),
    [
        ((5, 4, 3, 2, 1, 0), 1, "★☆☆", "133"),
        ((1, 0), 1, "★★★", "125"),
        ((5, 4, 3, 1, 0), 1, "★★☆", "127"),
    ],
)
def test_goals_of_two_links(again, ahead, stars, score, capsys):
    credit = kit.check.exercise_20_11(lambda: [*FORWARD, *backward(*again, ahead=ahead)])
    said = f"Exercise 20.11: {stars} {score} ms; the best known answer has 125.\n"
    assert capsys.readouterr().out == said
    assert sum(credit.parts.values()) == stars.count("★")


@pytest.mark.parametrize(
    ("name", "order", "fact"),
    [
        ("no goal", [*FORWARD, *backward(5, 4, 3, 2, 1, 0)], "158 ms where at most 140 are the"),
        ("not an order", [0, 1], "0 is nothing that NVLink does\n"),
        ("not an order", None, "None is nothing that NVLink does\n"),
        ("missing or twice", FORWARD, "'reduce 0' is there 0 times\n"),
        ("missing or twice", [*FORWARD, *backward(1, 0), "reduce 1"], "is there 2 times\n"),
        ("never begins", ["reduce 5", *FORWARD, *backward(1, 0)[1:]], "'reduce 5' never begins,"),
        ("never begins", [*FORWARD, *backward()], "'gather 2' never begins,"),
    ],
)
def test_an_order_that_is_wrong_or_slow(name, order, fact):
    assert_mistake(kit.check.exercise_20_11, lambda: order, name, fact)


def cut_by_limits(seconds, kept, stages, memory):
    """Cut a pipeline by trying limits for the slowest stage, from the last stage to the first."""
    for limit in sorted({sum(seconds[i:j]) for j in range(len(seconds) + 1) for i in range(j)}):
        lengths, end = [], len(seconds)
        for ahead in range(1, stages + 1):
            start = end
            while (
                start > stages - ahead
                and sum(seconds[start - 1 : end]) <= limit
                and ahead * sum(kept[start - 1 : end]) <= memory
            ):
                start -= 1
            lengths.insert(0, end - start)
            end = start
        if end == 0 and min(lengths) > 0:
            return lengths
    return None


def test_a_pipeline_that_is_cut_in_another_way_is_right():
    kit.check.exercise_20_10(cut_by_limits)
