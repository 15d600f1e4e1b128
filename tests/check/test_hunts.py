"""A hunt's broken program fails, and so does each half repair, with the mistake that it makes."""

from __future__ import annotations

import pytest
from answers import assert_mistake

import ddp_kit as kit
from ddp_kit.check.hints import solutions
from ddp_kit.check.hunt import defined

pytestmark = pytest.mark.usefixtures("forked_ranks")

CHECKS = {
    check.exercise.number: check
    for check in (getattr(kit.check, name) for name in kit.check.__all__ if name != "credit")
    if check.exercise.kind == "hunt"
}
HANG_OR_RAISE = {"9.1", "9.2", "9.3", "9.10"}  # the others run to the end with a wrong result

# What the solution has, what is there instead, and which mistake that is.
HALF_REPAIRED = [
    ("9.1", "range(3)", "range(2)", "otherwise"),
    ("9.1", "    dist.barrier()", "    rank or dist.barrier()", "fails"),
    ("9.2", "mean.item() / world_size", "mean.item()", "otherwise"),
    ("9.2", "        dist.all_reduce(mean)\n", "", "fails"),
    ("9.3", "ReduceOp.MIN", "ReduceOp.MAX", "otherwise"),
    ("9.4", "seed=1", "seed=2", "otherwise"),
    ("9.4", "sampler.set_epoch", "loader.set_epoch", "fails"),
    ("9.4", "(epoch)\n", "(epoch), dist.all_reduce(torch.ones(9))\n", "too many bytes"),
    ("9.5", "parameters(), 1.0", "parameters(), 2.0", "otherwise"),
    ("9.6", "loss = model(x).square().mean()", "loss = model(x).square().sum()", "otherwise"),
    ("9.7", "total.item() / world_size", "total.item()", "otherwise"),
    ("9.7", "        dist.all_reduce(total)", "        rank or dist.all_reduce(total)", "fails"),
    ("9.8", "model.module.state_dict", "model.state_dict", "fails"),
    ("9.8", "(checkpoint)", "({'bias': checkpoint['bias']}, strict=False)", "otherwise"),
    ("9.9", "100 + rank", "rank", "otherwise"),
    ("9.10", "4 if rank == 0 else 3", "3", "otherwise"),
]


@pytest.mark.parametrize("number", CHECKS)
def test_a_broken_program_fails(number):
    train = defined(number, solutions()[number]["broken"])
    assert_mistake(CHECKS[number], train, "fails" if number in HANG_OR_RAISE else "as before")


@pytest.mark.parametrize(("number", "old", "new", "mistake"), HALF_REPAIRED)
def test_a_half_repair_fails(number, old, new, mistake):
    repaired = solutions()[number]["solution"]
    assert repaired.count(old) == 1
    assert_mistake(CHECKS[number], defined(number, repaired.replace(old, new)), mistake)
