"""A hunt's broken program fails, and so does each half repair, with the mistake that it makes."""

from __future__ import annotations

import pytest
from answers import assert_mistake, solved

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions

pytestmark = pytest.mark.usefixtures("forked_ranks")

CHECKS = {
    check.exercise.number: check
    for check in (getattr(kit.check, name) for name in kit.check.__all__ if name != "credit")
    if check.exercise.kind == "hunt"
}
GET_STUCK = {"9.1", "9.2", "9.3", "9.10"}  # the others run to the end with a wrong result
SEND_TOO_MUCH = {"8.7"}  # or with the right one

# What the solution has, what is there instead, and which mistake that is.
HALF_REPAIRED = [
    ("1.5", "isend(batch.clone(), dst)", "send(batch, dst)", "fails"),
    ("1.5", "[len(works)]", "[0 * len(works)]", "otherwise"),
    ("2.6", "[torch.zeros(2) for _ in range(world_size)]", "[torch.zeros(2)]", "fails"),
    ("2.6", "torch.stack(gathered)", "torch.stack(gathered[::-1])", "otherwise"),
    ("2.7", "dist.all_reduce(counts)", "dist.reduce(counts, dst=1)", "otherwise"),
    ("2.7", "dist.all_reduce(counts)", "rank or dist.all_reduce(counts)", "stuck"),
    ("2.8", "table[:, 1] = column", "table[:, 0] = column", "otherwise"),
    ("2.8", "    dist.all_reduce(column)", "    rank or dist.all_reduce(column)", "fails"),
    ("3.3", "src=0", "src=1", "otherwise"),
    ("3.3", "    dist.broadcast", "    rank or dist.broadcast", "stuck"),
    ("8.7", "micro < 3", "micro < 4", "otherwise"),
    ("8.7", "micro < 3", "rank == 0 and micro < 3", "stuck"),
    ("8.7", "micro < 3", "micro < 2", "too many bytes"),
    ("8.8", "if step == 2", "if step == 1", "otherwise"),
    ("8.8", "(model.module)", "(model.body)", "fails"),
    ("8.9", "manual_seed(rank)", "manual_seed(0)", "otherwise"),
    ("8.9", "[12, 6]", "[12, 7]", "fails"),
    ("11.9", "checkpoint = rank", "checkpoint = local_rank", "otherwise"),
    ("11.9", "world_size, rank, sh", "world_size, rank + 1, sh", "fails"),
    ("13.8", '"sum") / count', '"sum") / 6', "otherwise"),
    ("14.9", "losses.sum()", "losses.mean()", "otherwise"),
    ("14.9", "return loss", "return None if rank else loss", "stuck"),
    ("16.10", "y + bias", "y", "otherwise"),
    ("16.10", "    dist.all_reduce(y)", "    rank or dist.all_reduce(y)", "stuck"),
    ("16.11", "return total", "return total / world_size", "otherwise"),
    ("16.11", "    dist.all_reduce(total)", "    rank or dist.all_reduce(total)", "stuck"),
    ("17.10", ".mean() / 4)", ".mean() / world_size)", "otherwise"),
    ("17.10", "        if rank > 0:\n            dist.send(x.grad, rank - 1)\n", "", "stuck"),
    (
        "18.8",
        "dist.all_reduce(largest := own.max(), dist.ReduceOp.MAX)",
        "largest = own.max()",
        "otherwise",
    ),
    ("18.8", "dist.all_reduce(sums", "(lambda x: rank or dist.all_reduce(x))(sums", "stuck"),
    ("19.8", "/ world_size", "", "otherwise"),
    ("19.8", "    dist.all_reduce(load)", "    rank or dist.all_reduce(load)", "stuck"),
    ("9.1", "range(3)", "range(2)", "otherwise"),
    ("9.1", "    dist.barrier()", "    rank or dist.barrier()", "stuck"),
    ("9.2", "mean.item() / world_size", "mean.item()", "otherwise"),
    ("9.2", "        dist.all_reduce(mean)\n", "", "stuck"),
    ("9.2", "dist.all_reduce(mean)", "dist.all_reduce(mean.item())", ""),
    ("9.3", "ReduceOp.MIN", "ReduceOp.MAX", "otherwise"),
    ("9.4", "seed=1", "seed=2", "otherwise"),
    ("9.4", "sampler.set_epoch", "loader.set_epoch", "fails"),
    ("9.4", "(epoch)\n", "(epoch), dist.all_reduce(torch.ones(9))\n", "too many bytes"),
    ("9.5", ".mean() / 4)", ".mean())", "otherwise"),
    ("9.6", "loss = model(x).square().mean()", "loss = model(x).square().sum()", "otherwise"),
    ("9.7", "total.item() / world_size", "total.item()", "otherwise"),
    ("9.7", "        dist.all_reduce(total)", "        rank or dist.all_reduce(total)", "stuck"),
    ("9.8", "model.module.state_dict", "model.state_dict", "fails"),
    ("9.8", "(checkpoint)", "({'bias': checkpoint['bias']}, strict=False)", "otherwise"),
    ("9.9", "100 + rank", "rank", "otherwise"),
    ("9.10", "4 if rank == 0 else 3", "3", "otherwise"),
]


@pytest.mark.parametrize("number", CHECKS)
def test_a_broken_program_fails(number):
    train = defined(number, solutions()[number]["broken"], "train")
    mistake = "stuck" if number in GET_STUCK else "as before"
    mistake = "too many bytes" if number in SEND_TOO_MUCH else mistake
    assert_mistake(CHECKS[number], train, mistake)


@pytest.mark.parametrize(("number", "old", "new", "mistake"), HALF_REPAIRED)
def test_a_half_repair_fails(number, old, new, mistake):
    assert_mistake(CHECKS[number], solved(number, {old: new}), mistake)


ALSO_REPAIRED = [
    ("9.7", "return log if rank == 0 else None", "return log"),
    (
        "9.8",
        "fresh = nn.Linear(2, 2)\n    fresh.load",
        "fresh = DistributedDataParallel(nn.Linear(2, 2))\n    fresh.module.load",
    ),
]


@pytest.mark.parametrize(("number", "old", "new"), ALSO_REPAIRED)
def test_another_repair_passes(number, old, new):
    assert CHECKS[number](solved(number, {old: new})) == 1
