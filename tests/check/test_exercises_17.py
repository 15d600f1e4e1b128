"""Wrong answers to the exercises of lesson 17, and the errors that the learner gets."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions

pytestmark = pytest.mark.usefixtures("forked_ranks")


def solution(number, name):
    return defined(number, solutions()[number]["program"], name)


@mistake("17.1", "otherwise", '\' in the order (B3: ("B", 3)) but holds 7\n')
def test_a_number_for_an_order(rank, p, m):
    return 7


@mistake("17.1", "otherwise", "but holds 'F0 F1 F2 F3 B1 B0 B2 B3'\n")
def test_an_order_in_which_gradients_overtake(rank, p, m):
    return [("F", i) for i in range(m)] + [("B", i) for i in (1, 0, *range(2, m))]


@mistake("17.1", "otherwise", "exercise 17.1, one_f_one_b(rank, 4, 2) on 4 ranks: wrong result\n")
def test_an_order_that_is_wrong_with_fewer_micro_batches_than_ranks(rank, p, m):
    return solution("17.1", "one_f_one_b")(rank, p, m if m >= p else m + p)


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
    ("name", "wrong"),
    [
        ("nothing to send", {"wanted": False}),
        ("no graph", {"again": False}),
        ("not divided", {"divide": "none"}),
        ("divided on every rank", {"divide": "all"}),
        ("wrong gradient sent", {"sent": "y"}),
        ("not sent", {"sent": None}),
        ("no backward", {"backward": False}),
        ("nothing to send", {"sent": "gradient"}),
        ("gradients cleared", {"clear": True}),
        ("no gradient passed", {"given": False}),
    ],
)
def test_a_backward(name, wrong):
    start = "exercise 17.2, backward(stage, x, target, 2) on 2 ranks: "
    assert_mistake(kit.check.exercise_17_2, going_back(**wrong), name, start)


@mistake("17.2", "otherwise")
def test_a_backward_with_another_target(stage, x, target, m):
    going_back()(stage, x, target + 1, m)


@mistake(
    "17.4",
    "otherwise",
    "should hold '0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 ...' in the order (2B3: (\"B\", 3, 2)) but holds "
    "'0F0 0F1 0F2 3F0 3F1 3F2 0F3 0F4 ...', where number 22 is 0B5 instead of 0B4\n",
)
def test_an_interleaved_order_that_is_wrong_late(rank, p, v, m):
    order = solution("17.4", "interleaved")(rank, p, v, m)
    return order if m < 6 else [*order[:-2], order[-1], order[-2]]


@mistake("17.4", "otherwise", '(2B3: ("B", 3, 2)) but holds 7\n')
def test_a_number_for_an_interleaved_order(rank, p, v, m):
    return 7


def enough(p, most):
    return max(1, math.ceil((p - 1) * (1 / most - 1) - 1e-9))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("idle by busy time", lambda p, most: max(1, math.ceil((p - 1) / most - 1e-9))),
        ("p ranks", lambda p, most: math.ceil(p * (1 / most - 1) - 1e-9)),
        ("one too many", lambda p, most: enough(p, most) + 1),
        ("one too few", lambda p, most: max(1, enough(p, most) - 1)),
        ("one too few", lambda p, most: max(1, round((p - 1) * (1 / most - 1)))),
        ("no whole number", lambda p, most: (p - 1) * (1 / most - 1) + 0.5),
        ("other number", lambda p, most: None),
        ("one rank", lambda p, most: enough(p, most) if p > 1 else 0),
    ],
)
def test_a_number_of_micro_batches(name, answer):
    facts = "exercise 17.3, micro_batches(", ") on 1 rank: it should return "
    assert_mistake(kit.check.exercise_17_3, answer, name, *facts)


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
    best = defined("17.12", solutions()["17.12"]["program"], "schedule")
    assert kit.check.credit(check, best) == 1
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
