"""Wrong answers to the exercises of lesson 20, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from answers import error_text

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
    ("wrong", "words"),
    [
        ({"in_place": False}, "The gradients are as before. Write into parameter.grad"),
        ({"divide": None}, "That is the sum. Divide it by the number of ranks along"),
        ({"divide": "all"}, 'Divide by the ranks along "dp" only'),
        ({"group": None}, 'Ranks along "tp" have different parameters, so their gradients must'),
        ({"group": None, "divide": "all"}, 'Pass the group along "dp": mesh.get_group("dp").'),
        ({"group": "tp"}, 'Those are the ranks along "tp", which have different parameters.'),
    ],
)
def test_a_mean_that_is(wrong, words):
    text = error_text(kit.check.exercise_20_1, average(**wrong))
    assert text.startswith("exercise 20.1, average_gradients(model, mesh of 2 x 2) on 4 ranks: ")
    assert words in text


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
    ("wrong", "words"),
    [
        ({"shared": (0, 14, 14, 16)}, "A stage shares 0, 12, 14 or 16 of the 16 bytes"),
        ({"largest": True}, "Return the smallest that fits: a higher stage may send more."),
        ({"never": 4}, "If not even stage 3 fits, return None."),
    ],
)
def test_a_stage_that_is(wrong, words):
    text = error_text(kit.check.exercise_20_2, smallest_stage(**wrong))
    assert text.startswith("exercise 20.2, smallest_stage(7.5e+09, 64, ")
    assert words in text


def test_a_stage_of_another_type_is_refused():
    for wrong in (True, 0.0, "0"):
        assert "where 0 is right" in error_text(kit.check.exercise_20_2, lambda *_, x=wrong: x)


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
    ("wrong", "words"),
    [
        ({"least_first": True}, "Take the dimensions in the order of the bytes that they send"),
        ({"crowded": True}, "Those are 512 ranks, and a host has 8."),
        ({"one": True}, "There is room for more: those are 4 of 16 ranks."),
        ({"as_set": True}, "Return a list of names"),
        ({"given_order": True}, "Take the dimensions in the order of the bytes"),
    ],
)
def test_a_choice_that_is(wrong, words):
    assert words in error_text(kit.check.exercise_20_3, inside(**wrong))


def test_a_choice_in_another_order_is_refused():
    text = error_text(kit.check.exercise_20_3, lambda *call: inside()(*call)[::-1])
    assert "Begin with the dimension that sends most" in text


def step_seconds(matrices=6, scores=12, per_gpu=True, use=lambda mfu: 1 / mfu, per_token=False):
    """Return an answer to 20.4; each argument can make it wrong in one way."""

    def answer(layers, width, parameters, context, tokens, gpus, peak, mfu):
        each = matrices * parameters + scores * layers * width * context
        each *= 1 if per_token else tokens
        return each / (gpus if per_gpu else 1) / peak * use(mfu)

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scores": 0}, "The attention is missing"),
        ({"matrices": 2, "scores": 4}, "That is forward only."),
        ({"matrices": 2}, "A parameter needs 6 FLOPs per token."),
        ({"scores": 4}, "Backward needs attention, too."),
        ({"per_gpu": False}, "All GPUs work at the same time"),
        ({"use": lambda mfu: 1}, "Only the share mfu of the peak is reached."),
        ({"use": lambda mfu: mfu}, "Divide by mfu"),
        ({"per_token": True}, "That is one token."),
        ({"matrices": 7}, "FLOPs of all tokens, divided by gpus * peak * mfu."),
    ],
)
def test_a_step_that_is(wrong, words):
    text = error_text(kit.check.exercise_20_4, step_seconds(**wrong))
    assert text.startswith("exercise 20.4, step_seconds(126, 16384, 4.05e+11, 8192, 1.68e+07, ")
    assert words in text


def test_no_number_is_no_time():
    text = error_text(kit.check.exercise_20_4, lambda *_: None)
    assert "it returns None where" in text
