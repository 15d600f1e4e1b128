"""Answers to the record of lesson 12, and the errors that the learner gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from answers import assert_mistake, solved

import ddp_kit as kit
from ddp_kit import model

pytestmark = pytest.mark.usefixtures("forked_ranks")


def planned(**sizes):
    """Return an answer to 12.11: a plan with these sizes, and as many micro-batches as needed."""

    def choose_plan(transformer, cluster, gpus, batch):
        plan = model.Plan(**sizes)
        many = max(1, batch // plan.batch)
        return replace(plan, micro_batches=many)

    return choose_plan


def fastest_of_the_planner(transformer, cluster, gpus, batch):
    return model.plans(transformer, cluster, gpus, batch).fitting[0].plan


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (planned(dp=32, tp=8, pp=4, zero=1), "★☆☆ 21.0748 s"),
        (fastest_of_the_planner, "★★☆ 17.9837 s"),
        (solved("12.11"), "★★★ 17.1136 s"),
    ],
)
def test_a_plan_has_its_stars(answer, score, capsys):
    picture = kit.check.exercise_12_11(answer).picture
    assert f"Exercise 12.11: {score}" in capsys.readouterr().out
    assert str(picture).count("Llama 3 70B  compute") == 2


@pytest.mark.parametrize(
    ("answer", "name", "fact"),
    [
        (planned(dp=8, tp=8, pp=16, zero=1), "no goal", "22.9053 s where at most 21.5"),
        (lambda transformer, cluster, gpus, batch: (8, 8, 16), "no plan", "returns (8, 8, 16)"),
        (planned(dp=4, tp=8, pp=4, zero=1), "other ranks", "has 128 ranks, and not 1,024"),
        (
            lambda transformer, cluster, gpus, batch: model.Plan(128, 3, 8),
            "other batch",
            "has 128 sequences in a step, and not 1,024",
        ),
        (planned(dp=32, tp=8, pp=1, cp=4, zero=0), "too much memory", "72.0 GB may be used"),
        (planned(dp=4, tp=8, pp=32, zero=1), "cannot be shared so", "80 layers cannot be cut"),
    ],
)
def test_wrong_plans(answer, name, fact):
    assert_mistake(kit.check.exercise_12_11, answer, name, fact)
