"""Wrong answers to the exercises of lesson 18, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions
from ddp_kit.lessons.context_parallel import exchange_rows

pytestmark = pytest.mark.usefixtures("forked_ranks")


@mistake("18.2", "otherwise", "exercise 18.2, block_mask(rank, step, n, chunk) on 2 ranks: wrong")
def test_a_mask_of_numbers(rank, step, n, chunk):
    return torch.zeros(chunk, chunk)


@mistake("18.3", "otherwise", "exercise 18.3, bring_home(parts) on 2 ranks: wrong result")
def test_a_sum_of_the_own_parts(parts):
    return sum(parts)


@mistake("18.3", "unmatched", "exercise 18.3, bring_home(parts) on 2 ranks: it deadlocks")
def test_gradients_that_are_received_before_they_are_sent(parts):
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(parts[rank])
    dist.recv(arriving, (rank - 1) % n)
    dist.send(parts[rank], (rank + 1) % n)
    return arriving


@mistake("18.3", "collective", "on 2 ranks: all_reduce was called\n")
def test_gradients_that_an_all_reduce_sums(parts):
    total = torch.stack(parts)
    dist.all_reduce(total)
    return total[dist.get_rank()]


def experts(counts, back):
    """Return an answer to 18.4. counts: whether they are exchanged. back: the lists for the way."""

    def through_experts(tokens, choice, expert):
        order = choice.argsort(stable=True)
        going = torch.bincount(choice, minlength=dist.get_world_size())
        coming = torch.zeros_like(going)
        if counts:
            dist.all_to_all_single(coming, going)
        else:
            coming = going  # a rank takes for granted that as many come as go
        going, coming = going.tolist(), coming.tolist()
        arrived = exchange_rows(tokens[order], going, coming)
        return exchange_rows(expert(arrived), *back(going, coming))[order.argsort()]

    return through_experts


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("wrong counts", experts(True, lambda going, coming: (going, coming))),
        ("wrong counts", experts(False, lambda going, coming: (coming, going))),
        ("otherwise", lambda tokens, choice, expert: expert(tokens)),
    ],
)
def test_tokens(name, answer):
    start = "exercise 18.4, through_experts(tokens, choice, expert) on "
    assert_mistake(kit.check.exercise_18_4, answer, name, start)


def by_rank(rank_of):
    """Return an answer to 18.12 that puts chunk i on rank_of(i)."""
    return lambda: [[i for i in range(32) if rank_of(i) == rank] for rank in range(8)]


def test_each_goal_of_a_deal_is_worth_a_point(capsys):
    check = kit.check.exercise_18_12
    credit = check(by_rank(lambda i: i % 8))
    assert "Exercise 18.12: ★☆☆ 54 units of time; the best" in capsys.readouterr().out
    assert list(credit.parts.values()) == [True, False, False]
    best = defined("18.12", solutions()["18.12"]["program"], "deal")
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
def test_a_deal(rank_of, name, fact):
    assert_mistake(kit.check.exercise_18_12, by_rank(rank_of), name, fact)


@mistake("18.12", "other lists", "it should return a list of 8 lists")
def test_a_number_for_a_deal():
    return 7
