"""Wrong answers to the exercises of lesson 17, and the errors that the learner gets."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import error_text

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def ordering(extra=0, middle="FB", forwards_first=False, reverse=False, rest=True):
    """Return an answer to 17.1; each argument can make it wrong in one way."""

    def answer(rank, p, m):
        first = rank if reverse else p - 1 - rank
        first = m if forwards_first else max(0, min(first + extra, m))
        order = [("F", i) for i in range(first)]
        for i in range(m - first):
            pair = {"F": ("F", first + i), "B": ("B", i)}
            order += [pair[kind] for kind in middle]
        return order + [("B", i) for i in range(m - first, m) if rest]

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"forwards_first": True}, "That is GPipe."),
        ({"extra": 1}, "One forward too many in the beginning"),
        ({"extra": -1}, "One forward too few in the beginning"),
        ({"middle": "BF"}, "In the middle, the forward comes first."),
        ({"reverse": True}, "The first rank has the most forwards in the beginning"),
        ({"rest": False}, "needs a forward and a backward: some are missing."),
    ],
)
def test_an_order_that_is(wrong, words):
    text = error_text(kit.check.exercise_17_1, ordering(**wrong))
    assert text.startswith("exercise 17.1, one_f_one_b(rank, 3, 4) on 3 ranks: wrong result")
    assert words in text
    assert text.endswith(' (B3 is short for ("B", 3).)')


@pytest.mark.parametrize("value", [7, ["F0", "B0"]])
def test_what_is_no_order(value):
    text = error_text(kit.check.exercise_17_1, lambda rank, p, m: value)
    assert 'Return a list of ("F", i) and ("B", i)' in text or "some are missing" in text


def test_an_order_of_fewer_micro_batches_than_ranks():
    def answer(rank, p, m):
        return ordering()(rank, p, m) if m >= p else ordering(forwards_first=True)(0, p, m + p)

    text = error_text(kit.check.exercise_17_1, answer)
    assert text.startswith("exercise 17.1, one_f_one_b(rank, 4, 2) on 4 ranks: wrong result")


def going_back(
    wanted=True, divide="last", sent="x", again=True, backward=True, clear=False, given=True
):
    """Return an answer to 17.2; each argument can make it wrong in one way."""

    def answer(stage, x, target, m):
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        gradient = None
        if rank < last:
            gradient = torch.empty_like(x)
            dist.recv(gradient, src=rank + 1)
        if clear:
            stage.zero_grad()
        if wanted:
            x.requires_grad_()
        with torch.set_grad_enabled(again):
            y = stage(x)
        out = y
        if rank == last:
            out = F.mse_loss(y, target)
        if divide == "all" or (divide == "last" and rank == last):
            out = out / m
        if backward:
            if y.requires_grad:
                y.retain_grad()
            out.backward(gradient if given else None)
        if rank > 0 and sent:
            tensor = (
                {"x": x.grad, "y": y.grad, "gradient": gradient}[sent]
                if backward
                else torch.zeros_like(x)
            )
            dist.send(tensor, dst=rank - 1)

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"wanted": False}, "x.requires_grad_() before the forward"),
        ({"again": False}, "There is no graph yet"),
        ({"divide": "none"}, "Each gradient is m times too large"),
        ({"divide": "all"}, "Only the last stage divides by m"),
        ({"sent": "y"}, "and not that of its output."),
        ({"sent": None}, "Every rank but the first sends the gradient of its x"),
        ({"backward": False}, "No stage has a gradient"),
        ({"sent": "gradient"}, "Send x.grad."),
        ({"clear": True}, "Only the last micro-batch is left in the gradients"),
        ({"given": False}, "on the other ranks, y.backward(gradient)."),
    ],
)
def test_a_backward_that_is(wrong, words):
    text = error_text(kit.check.exercise_17_2, going_back(**wrong))
    assert text.startswith("exercise 17.2, backward(stage, x, target, 2) on 2 ranks: ")
    assert words in text


def test_a_backward_with_a_wrong_loss():
    def answer(stage, x, target, m):
        return going_back()(stage, x, target + 1, m)

    assert "Compute y = stage(x) again" in error_text(kit.check.exercise_17_2, answer)


def interleaving(stride=2, more=0, back=-1, rest=True):
    """Return an answer to 17.4; each argument can make it wrong in one way."""

    def answer(rank, p, v, m):
        stages = [rank + p * k for k in range(v)]
        forwards, backwards = (
            [(kind, i, s) for g in range(0, m, p) for s in stages[::turn] for i in range(g, g + p)]
            for kind, turn in (("F", 1), ("B", back))
        )
        first = min(stride * (p - 1 - rank) + (v - 1) * p + more, v * m)
        pairs = chain.from_iterable(zip(forwards[first:], backwards, strict=False))
        return [*forwards[:first], *pairs, *(backwards[v * m - first :] if rest else [])]

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stride": 1}, "A rank needs two forwards more than the rank after it"),
        ({"more": 1}, "One forward too many in the beginning."),
        ({"more": -1}, "One forward too few in the beginning."),
        ({"back": 1}, "take its stages in reverse order."),
        ({"rest": False}, "needs a forward and a backward in each stage."),
    ],
)
def test_an_interleaved_order_that_is(wrong, words):
    text = error_text(kit.check.exercise_17_4, interleaving(**wrong))
    assert text.startswith("exercise 17.4, interleaved(rank, 2, 2, 4) on 2 ranks: wrong result")
    assert words in text


def test_a_long_order_shows_the_first_difference():
    def late(rank, p, v, m):
        order = interleaving()(rank, p, v, m)
        return order if m < 6 else [*order[:-2], order[-1], order[-2]]

    text = error_text(kit.check.exercise_17_4, late)
    assert (
        "rank 0 should return '0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 ...' but returns "
        "'0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 ...', where number 22 is 0B5 instead of 0B4\n"
    ) in text
    assert text.endswith(' (2B3 is short for ("B", 3, 2).)')


@pytest.mark.parametrize("value", [7, [("F", 0)] * 16])
def test_what_is_no_interleaved_order(value):
    text = error_text(kit.check.exercise_17_4, lambda rank, p, v, m: value)
    assert "in each stage" in text or "Make the list of the backwards" in text


def enough(p, most):
    return max(1, math.ceil((p - 1) * (1 / most - 1) - 1e-9))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, most: max(1, math.ceil((p - 1) / most - 1e-9)), "(p-1)/m is the idle time"),
        (lambda p, most: math.ceil(p * (1 / most - 1) - 1e-9), "passes p - 1 ranks before"),
        (lambda p, most: enough(p, most) + 1, "One less is enough"),
        (lambda p, most: max(1, enough(p, most) - 1), "round up"),
        (lambda p, most: max(1, round((p - 1) * (1 / most - 1))), "round up"),
        (lambda p, most: (p - 1) * (1 / most - 1) + 0.5, "Return a whole number: round up."),
        (lambda p, most: None, "Solve (p-1)/(m+p-1) <= most for m"),
        (lambda p, most: enough(p, most) if p > 1 else 0, "One rank never waits for another"),
    ],
)
def test_a_number_that_is_wrong(answer, words):
    text = error_text(kit.check.exercise_17_3, answer)
    assert text.startswith("exercise 17.3, micro_batches(")
    assert "), called on 1 rank: it should return " in text
    assert words in text
