"""Wrong answers to the exercises of lesson 18, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions
from ddp_kit.lessons.context_parallel import exchange_rows, start_exchange, wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")


def mask(owner=lambda rank, step, n: (rank - step) % n, compare=torch.le, change=lambda m: m):
    """Return an answer to 18.2; each argument can make it wrong in one way."""

    def block_mask(rank, step, n, chunk):
        queries = rank * chunk + torch.arange(chunk)
        keys = owner(rank, step, n) * chunk + torch.arange(chunk)
        return change(compare(keys, queries[:, None]))

    return block_mask


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("other way round", {"owner": lambda rank, step, n: (rank + step) % n}),
        ("no modulo", {"owner": lambda rank, step, n: rank - step}),
        ("own chunk", {"owner": lambda rank, step, n: rank}),
        ("transposed", {"change": lambda m: m.T}),
        ("own position masked", {"compare": torch.lt}),
        ("inverted", {"compare": torch.gt}),
        ("otherwise", {"change": lambda m: m.float()}),
    ],
)
def test_a_mask(name, wrong):
    start = "exercise 18.2, block_mask(rank, step, n, chunk) on "
    assert_mistake(kit.check.exercise_18_2, mask(**wrong), name, start)


def home(steps=lambda n: n, block=lambda rank, step: rank - step, last=False, exchange=True):
    """Return an answer to 18.3; each argument can make it wrong in one way."""

    def bring_home(parts):
        rank, n = dist.get_rank(), dist.get_world_size()
        total = parts[rank]
        for step in range(1, steps(n) + 1):
            arriving = torch.empty_like(total)
            if exchange:
                wait_for(start_exchange(total, arriving))
            elif n > 1:
                dist.recv(arriving, (rank - 1) % n)
                dist.send(total, (rank + 1) % n)
            total = arriving + parts[block(rank, step) % n] if step < n or last else arriving
        return total

    return bring_home


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("nothing exchanged", home(steps=lambda n: 0)),
        ("one step missing", home(steps=lambda n: n - 1)),
        ("own part twice", home(last=True)),
        ("other way round", home(block=lambda rank, step: rank + step)),
        ("own block", home(block=lambda rank, step: rank)),
        ("unmatched", home(exchange=False)),
        ("otherwise", lambda parts: sum(parts)),
    ],
)
def test_gradients(name, answer):
    start = "exercise 18.3, bring_home(parts) on "
    assert_mistake(kit.check.exercise_18_3, answer, name, start)


@mistake("18.3", "collective", "on 2 ranks: all_reduce was called\n")
def test_gradients_that_an_all_reduce_sums(parts):
    total = torch.stack(parts)
    dist.all_reduce(total)
    return total[dist.get_rank()]


def experts(counts=True, back=lambda going, coming: (coming, going), restore=torch.argsort):
    """Return an answer to 18.4; each argument can make it wrong in one way."""

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
        returned = exchange_rows(expert(arrived), *back(going, coming))
        return returned[restore(order)]

    return through_experts


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("not put back", experts(restore=lambda order: slice(None))),
        ("sorted twice", experts(restore=lambda order: order)),
        ("wrong counts", experts(back=lambda going, coming: (going, coming))),
        ("wrong counts", experts(counts=False)),
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
