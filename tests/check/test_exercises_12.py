"""Wrong answers to the exercises of lesson 12, and the errors that the learner gets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit import model
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions

IT = "on 1 rank: it should return"

pytestmark = pytest.mark.usefixtures("forked_ranks")


def costs(
    rounds=2, chunk=True, levels=2, halves=True, surplus=True, core=True, swapped=False, beta=True
):
    """Return an answer to 12.1; each argument can make it wrong in one way."""

    def answer(n, nbytes, alpha, beta_):
        beta_ = beta_ if beta or not alpha else 0
        below = 2 ** (n.bit_length() - 1) if core else n
        ring = rounds * (n - 1) * (alpha + (nbytes / n if chunk else nbytes) * beta_)
        steps = math.log2(below)
        halving = levels * steps * alpha
        halving += 2 * ((below - 1) / below if halves else steps) * nbytes * beta_
        if below < n and surplus:
            halving += 2 * (alpha + nbytes * beta_)
        return (halving, ring) if swapped else (ring, halving)

    return answer


RING, HALVING = "for the seconds of the ring", "for the seconds of halving-doubling"


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"rounds": 1}, "once round", f"two_costs(8, 4000, 1, 0) {IT} 14 {RING} but returns 7\n"),
        (
            {"chunk": False},
            "whole tensors",
            f"two_costs(8, 4000, 0, 1) {IT} 7,000 {RING} but returns 56,000\n",
        ),
        ({"levels": 1}, "one way only", f"should return 6 {HALVING} but returns 3\n"),
        ({"halves": False}, "whole swaps", f"should return 7,000 {HALVING} but returns 24,000\n"),
        (
            {"surplus": False},
            "others left out",
            f"two_costs(6, 4000, 1, 0) {IT} 6 {HALVING} but returns 4\n",
        ),
        ({"core": False}, "others left out", f"{HALVING} but returns 5.16993\n"),
        ({"swapped": True}, "swapped", f"should return 14 {RING} but returns 6\n"),
        ({"beta": False}, "price left out", f"two_costs(8, 4000, 2e-05, 2e-10) {IT} 0.0002814 for"),
    ],
)
def test_costs_that_are(wrong, name, fact):
    assert_mistake(kit.check.exercise_12_1, costs(**wrong), name, "exercise 12.1, two_costs(", fact)


@mistake("12.1", "one time only", "two_costs(8, 4000, 1, 0) on 1 rank: it returns 14.0\n")
def test_costs_of_one_algorithm_only(n, nbytes, alpha, beta):
    return 14.0


def rate(scale=lambda k: k, start=0.1, off=0, grows=False, warms=True, guard=True):
    """Return an answer to 12.2; each argument can make it wrong in one way."""

    def answer(step, batch, warmup):
        whole = 0.1 * scale(batch / 256)
        if warms and (grows or step < warmup or (not guard and step == 0)):
            return start + (whole - start) * (step + off) / warmup
        return whole

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        (
            {"scale": lambda k: 1},
            "not scaled",
            f"learning_rate(5000, 8192, 1000) {IT} 3.2 but returns 0.1\n",
        ),
        ({"scale": math.sqrt}, "not scaled", "should return 3.2 but returns 0.565685\n"),
        (
            {"scale": lambda k: max(1, k)},
            "small batch",
            f"learning_rate(5000, 64, 1000) {IT} 0.025 but returns 0.1\n",
        ),
        ({"start": 0}, "wrong beginning", f"learning_rate(0, 8192, 1000) {IT} 0.1 but returns 0\n"),
        ({"off": 1}, "wrong beginning", "should return 0.1 but returns 0.1031\n"),
        ({"warms": False}, "wrong beginning", "should return 0.1 but returns 3.2\n"),
        (
            {"grows": True},
            "grows on",
            f"learning_rate(5000, 8192, 1000) {IT} 3.2 but returns 15.6\n",
        ),
        (
            {"guard": False},
            "",
            "exercise 12.2, learning_rate(0, 8192, 0) on 1 rank: it raised an error\n",
        ),
    ],
)
def test_a_rate_that_is(wrong, name, fact):
    assert_mistake(kit.check.exercise_12_2, rate(**wrong), name, fact)


@mistake("12.2", "uneven steps", f"learning_rate(500, 8192, 1000) {IT} 1.65 but returns 0.565685\n")
def test_a_rate_that_grows_by_a_factor(step, batch, warmup):
    return 0.1 * (batch / 256) ** (min(step, warmup) / max(1, warmup) if warmup else 1)


@mistake("12.2", "too early", f"learning_rate(999, 8192, 1000) {IT} 3.1969 but returns 3.2\n")
def test_a_rate_that_is_whole_one_step_early(step, batch, warmup):
    return rate()(step if step < 999 else 1000, batch, warmup)


@mistake("12.2", "no warm-up", f"learning_rate(0, 8192, 0) {IT} 3.2 but returns 0.1\n")
def test_a_rate_that_is_always_small_in_step_0(step, batch, warmup):
    return rate()(step, batch, warmup) if step else 0.1


def ranks(kept=(16, 4, 2, 0), whole=16, rounding=math.ceil, never=None, least=1):
    """Return an answer to 12.3; each argument can make it wrong in one way."""

    def answer(parameters, memory, stage):
        room = memory / parameters - kept[stage]
        if room <= 0:
            return never
        return max(least, rounding((whole - kept[stage]) / room))

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        (
            {"rounding": math.floor},
            "not rounded up",
            f"ranks_needed(6.7e+09, 3e+10, 3) {IT} 4 but returns 3\n",
        ),
        ({"rounding": float}, "not rounded up", "should return 4 but returns 3.57333\n"),
        ({"whole": 2}, "wrong bytes", "should return 4 but returns 1\n"),
        (
            {"kept": (0, 0, 0, 0)},
            "wrong bytes",
            f"ranks_needed(6.7e+09, 3e+10, 2) {IT} 6 but returns 4\n",
        ),
        (
            {"kept": (16, 0, 2, 0)},
            "wrong bytes",
            f"ranks_needed(6.7e+09, 3e+10, 1) {IT} 26 but returns 4\n",
        ),
        (
            {"never": math.inf},
            "never fits",
            f"ranks_needed(6.7e+09, 3e+10, 0) {IT} None but returns inf\n",
        ),
        (
            {"kept": (0, 4, 2, 0)},
            "never fits",
            f"ranks_needed(6.7e+09, 3e+10, 0) {IT} None but returns 4\n",
        ),
        ({"least": 0}, "stage 0 divided", f"ranks_needed(1e+09, 8e+10, 0) {IT} 1 but returns 0\n"),
    ],
)
def test_a_number_of_ranks_that_is(wrong, name, fact):
    assert_mistake(kit.check.exercise_12_3, ranks(**wrong), name, fact)


@mistake("12.3", "none though it fits", "should return 4 but returns None\n")
def test_a_model_that_fits_but_is_said_not_to(parameters, memory, stage):
    return None


def utilization(each=6, attention=True, all_gpus=True, factor=1):
    """Return an answer to 12.4; each argument can make it wrong in one way."""

    def mfu(tokens_per_second, gpus, parameters, layers, width, length, peak):
        needed = each * parameters + (12 * layers * width * length if attention else 0)
        return factor * needed * tokens_per_second / ((gpus if all_gpus else 1) * peak)

    return mfu


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"each": 2}, "wrong operations", "should return 0.412308 but returns 0.137436\n"),
        (
            {"attention": False},
            "no attention",
            f"4096, 4096, 3.12e+14) {IT} 0.478384 but returns 0.412308\n",
        ),
        ({"all_gpus": False}, "one peak", "mfu(25600, 8, 6.7e+09"),
        ({"factor": 100}, "percentage", "should return 0.412308 but returns 41.2308\n"),
    ],
)
def test_a_utilization_that_is(wrong, name, fact):
    assert_mistake(kit.check.exercise_12_4, utilization(**wrong), name, fact)


@mistake("12.4", "wrong operations", "should return 0.412308 but returns None\n")
def test_a_utilization_that_returns_nothing(
    tokens_per_second, gpus, parameters, layers, width, length, peak
):
    pass


def planned(**sizes):
    """Return an answer to 12.11: a plan with these sizes, and as many micro-batches as needed."""

    def choose_plan(transformer, cluster, gpus, batch):
        plan = model.Plan(**sizes)
        many = max(1, batch // plan.batch)
        return replace(plan, micro_batches=many)

    return choose_plan


def fastest_of_the_planner(transformer, cluster, gpus, batch):
    return model.plans(transformer, cluster, gpus, batch).fitting[0].plan


def test_a_usual_plan_reaches_the_first_goal(capsys):
    kit.check.exercise_12_11(planned(dp=32, tp=8, pp=4, zero=1))
    assert "Exercise 12.11: ★☆☆ 21.0748 s" in capsys.readouterr().out


def test_the_planner_reaches_the_second_goal(capsys):
    kit.check.exercise_12_11(fastest_of_the_planner)
    assert "Exercise 12.11: ★★☆ 17.9837 s" in capsys.readouterr().out


def test_the_best_known_plans_reach_all_goals(capsys):
    solution = defined("12.11", solutions()["12.11"]["program"], "choose_plan")
    picture = kit.check.exercise_12_11(solution).picture
    assert "Exercise 12.11: ★★★ 17.1136 s" in capsys.readouterr().out
    assert [
        str(picture).count(row) for row in ("Llama 3 70B  compute", "GPT-3 175B   compute")
    ] == [2, 2]


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
