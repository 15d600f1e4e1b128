"""Wrong answers to the exercises of lesson 20, and the errors that the learner gets."""

from __future__ import annotations

import pytest
from answers import assert_mistake, mistake

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def smallest_stage(shared=(0, 12, 14, 16), largest=False, never=None):
    """Return an answer to 20.2; each argument can make it wrong in one way."""

    def answer(parameters, ranks, memory):
        fits = [
            stage
            for stage, part in enumerate(shared)
            if parameters * (16 - part + part / ranks) <= memory
        ]
        return (fits[-1] if largest else fits[0]) if fits else never

    return answer


@pytest.mark.parametrize(
    ("name", "wrong", "fact"),
    [
        ("wrong bytes", {"shared": (0, 14, 14, 16)}, "it returns 1 where 2 is right\n"),
        ("not the smallest", {"largest": True}, "it returns 3 where 0 is right\n"),
        ("nothing fits", {"never": 4}, "it returns 4 where None is right\n"),
    ],
)
def test_a_stage(name, wrong, fact):
    start = "exercise 20.2, smallest_stage(7.5e+09, 64, "
    needed = "stages 0 to 3 need 120.0, 31.4, 16.6, 1.9 GB on a rank, and it has "
    assert_mistake(kit.check.exercise_20_2, smallest_stage(**wrong), name, start, fact, needed)


@pytest.mark.parametrize("stage", [True, 0.0, "0"])
def test_a_stage_of_another_type_is_refused(stage):
    with pytest.raises(kit.ExerciseError, match="where 0 is right\n"):
        kit.check.exercise_20_2(lambda *_: stage)


def inside(least_first=False, crowded=False, one=False, as_set=False, given_order=False):
    """Return an answer to 20.3; each argument can make it wrong in one way."""

    def answer(sent, ranks, per_host):
        names = list(sent) if given_order else sorted(sent, key=sent.get, reverse=not least_first)
        chosen = []
        for name in names:
            if per_host % ranks[name] and not crowded:
                break
            chosen.append(name)
            per_host = max(1, per_host // ranks[name])
            if one:
                break
        return set(chosen) if as_set else chosen

    return answer


@pytest.mark.parametrize(
    ("name", "wrong", "fact"),
    [
        ("not in order", {"least_first": True}, "where ['tp'] is right\n"),
        ("too many ranks", {"crowded": True}, "these are 512 ranks, and a host has 8\n"),
        ("stops early", {"one": True}, "these are 4 ranks, and a host has 16\n"),
        ("no list", {"as_set": True}, "it returns {'tp'} where ['tp'] is right\n"),
        ("not in order", {"given_order": True}, "it returns [] where ['tp'] is right\n"),
    ],
)
def test_a_choice(name, wrong, fact):
    assert_mistake(kit.check.exercise_20_3, inside(**wrong), name, fact)


@mistake("20.3", "not most first")
def test_a_choice_in_another_order(sent, ranks, per_host):
    return inside()(sent, ranks, per_host)[::-1]


def step_seconds(matrices=6, scores=12, per_gpu=True, use=lambda mfu: 1 / mfu, per_token=False):
    """Return an answer to 20.4; each argument can make it wrong in one way."""

    def answer(layers, width, parameters, context, tokens, gpus, peak, mfu):
        each = matrices * parameters + scores * layers * width * context
        each *= 1 if per_token else tokens
        return each / (gpus if per_gpu else 1) / peak * use(mfu)

    return answer


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("no attention", {"scores": 0}),
        ("forward only", {"matrices": 2, "scores": 4}),
        ("two flops", {"matrices": 2}),
        ("attention forward only", {"scores": 4}),
        ("one gpu", {"per_gpu": False}),
        ("no mfu", {"use": lambda mfu: 1}),
        ("times mfu", {"use": lambda mfu: mfu}),
        ("one token", {"per_token": True}),
        ("other number", {"matrices": 7}),
    ],
)
def test_a_step(name, wrong):
    start = "exercise 20.4, step_seconds(126, 16384, 4.05e+11, 8192, 1.68e+07, "
    assert_mistake(kit.check.exercise_20_4, step_seconds(**wrong), name, start)


@mistake("20.4", "other number", "it should return 12.6968 seconds but returns None\n")
def test_a_step_without_a_number(*_):
    return None


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
