"""Wrong answers to the exercises of lesson 18, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions

pytestmark = pytest.mark.usefixtures("forked_ranks")


@mistake("18.2", "otherwise", "exercise 18.2, block_mask(rank, step, n, chunk) on 2 ranks: wrong")
def test_a_mask_of_numbers(rank, step, n, chunk):
    return torch.zeros(chunk, chunk)


@mistake("18.3", "otherwise", "exercise 18.3, gathered_backward(gradient) on 2 ranks: wrong")
def test_the_tokens_of_another_rank(gradient):
    parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), 2)][::-1]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own


@mistake(
    "18.3", "too many bytes", "exercise 18.3, gathered_backward(gradient) on 2 ranks: right, but"
)
def test_a_gradient_that_an_all_reduce_sums(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def by_rank(rank_of):
    """Return an answer to 18.10 that puts chunk i on rank_of(i)."""
    return lambda: [[i for i in range(32) if rank_of(i) == rank] for rank in range(8)]


def test_each_goal_of_an_assignment_is_worth_a_point(capsys):
    check = kit.check.exercise_18_10
    credit = check(by_rank(lambda i: i % 8))
    assert "Exercise 18.10: ★☆☆ 54 units of time; the best" in capsys.readouterr().out
    assert list(credit.parts.values()) == [True, False, False]
    best = defined("18.10", solutions()["18.10"]["program"], "assign")
    assert kit.check.credit(check, best) == 1
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
