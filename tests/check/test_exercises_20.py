"""Wrong answers to the exercises of lesson 20, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def average(group="dp", divide="dp", in_place=True):
    """Return an answer to 20.1; each argument can make it wrong in one way."""

    def answer(model, mesh):
        for parameter in model.parameters():
            gradient = parameter.grad if in_place else parameter.grad.clone()
            dist.all_reduce(gradient, group=mesh.get_group(group) if group else None)
            if divide:
                sizes = {"dp": mesh["dp"].size(), "tp": mesh["tp"].size(), "all": mesh.size()}
                gradient /= sizes[divide]

    return answer


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("unchanged", {"in_place": False}),
        ("not divided", {"divide": None}),
        ("divided by all ranks", {"divide": "all"}),
        ("over all ranks", {"group": None}),
        ("over all ranks", {"group": None, "divide": "all"}),
        ("along tp", {"group": "tp"}),
    ],
)
def test_a_mean(name, wrong):
    start = "exercise 20.1, average_gradients(model, mesh of 2 x 2) on 4 ranks: "
    assert_mistake(kit.check.exercise_20_1, average(**wrong), name, start)


@mistake("20.1", "other ranks", "rank 0 should hold [130, 260, 390, 520, 650, 780] in weight.grad")
def test_a_mean_of_nothing(model, mesh):
    model.weight.grad.zero_()


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


@mistake("20.4", "other number", "it returns None where 12.7 seconds are right\n")
def test_a_step_without_a_number(*_):
    return None
