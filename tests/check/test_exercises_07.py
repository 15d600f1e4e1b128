"""Wrong answers to the exercises of lesson 07, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import assert_mistake, mistake

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def scattering(first=1, cut=torch.split, order=1, whole=False):
    """Return an answer to 7.1; each argument can make it wrong in one way."""

    def scatter_batch(batch, sizes, width):
        rank, n = dist.get_rank(), len(sizes)
        if rank == 0:
            shards = cut(batch, sizes)[::order]
            for other in range(first, n):
                dist.send(batch if whole else shards[other].clone(), dst=other)
            return shards[0]
        mine = torch.empty(sum(sizes) if whole else sizes[rank], width)
        dist.recv(mine, src=0)
        return mine.split(sizes)[rank] if whole else mine

    return scatter_batch


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"first": 0}, "unmatched", "it raised an error\n"),
        (
            {"cut": lambda batch, sizes: batch.chunk(len(sizes))},
            "unmatched",
            "the ranks' calls do not match\n",
        ),
        (
            {"whole": True},
            "too much sent",
            "on 2 ranks: right, but 36 bytes were sent where 12 would be enough\n",
        ),
    ],
)
def test_a_scatter_that_is(wrong, name, fact):
    case = "exercise 7.1, scatter_batch(batch, ["
    assert_mistake(kit.check.exercise_7_1, scattering(**wrong), name, case, fact)


@mistake("7.1", "collective", "on 2 ranks: broadcast was called\n")
def test_a_scatter_that_broadcasts(batch, sizes, width):
    batch = torch.empty(sum(sizes), width) if batch is None else batch
    dist.broadcast(batch, src=0)
    return batch.split(sizes)[dist.get_rank()]


@mistake("7.1", "other order", "rank 1 should return [6, 7, 8] but returns [0, 1, 2]\n")
def test_shards_in_another_order(batch, sizes, width):
    return scattering()(batch if batch is None else batch.flip(0), sizes, width)


@mistake("7.1", "cut elsewhere", "rank 0 should return [0, 1, 2, 3, 4, 5] but returns [0, 1, 2] (")
def test_shards_that_are_cut_in_other_places(batch, sizes, width):
    return scattering()(batch, sizes[::-1], width)


@pytest.mark.parametrize("value", [None, torch.tensor(5.0), torch.zeros(2)])
def test_a_scatter_that_returns_something_else(value):
    def scatter_batch(batch, sizes, width):
        scattering()(batch, sizes, width)
        return value

    fact = "rank 0 should return [0, 1, 2, 3, 4, 5] but returns "
    assert_mistake(kit.check.exercise_7_1, scatter_batch, "not the shard", fact)


@mistake(
    "7.1",
    "not the shard",
    "rank 0 should return [0, 1, 2, 3, 4, 5] but returns [0, 3] (float32 of shape",
)
def test_shards_of_different_widths(batch, sizes, width):
    return scattering()(batch, sizes, width)[:, : 1 + dist.get_rank()]


@pytest.mark.parametrize(
    ("part_of_loss", "name"),
    [
        (lambda outputs, targets, total: F.mse_loss(outputs, targets), "sum of means"),
        (
            lambda outputs, targets, total: F.mse_loss(outputs, targets) / dist.get_world_size(),
            "mean of means",
        ),
        (
            lambda outputs, targets, total: F.mse_loss(outputs, targets, reduction="sum"),
            "not divided",
        ),
        (lambda outputs, targets, total: (outputs - targets).sum() / total, "otherwise"),
        (lambda outputs, targets, total: None, "no graph"),
        (lambda outputs, targets, total: 1.5, "no graph"),
        (lambda outputs, targets, total: outputs, "no graph"),
    ],
    ids=["own mean", "mean of means", "sum", "not squared", "nothing", "a float", "not a number"],
)
def test_a_part_that_is(part_of_loss, name):
    case = "exercise 7.2, part_of_loss(outputs, targets, total) for shards of [2, "
    assert_mistake(kit.check.exercise_7_2, part_of_loss, name, case)


def test_parts_may_be_cut_one_after_the_other(capsys):
    def in_parts(function, batch, n):
        def lengths(value):
            if isinstance(value, torch.Tensor):
                return [len(chunk) for chunk in value.chunk(n)]
            members = value.values() if isinstance(value, dict) else value
            several = isinstance(value, dict | list | tuple)
            return next(filter(None, map(lengths, members)), None) if several else None

        def taken(value, begin, end):
            if isinstance(value, torch.Tensor):
                return value[begin:end]
            if isinstance(value, dict):
                return {key: taken(each, begin, end) for key, each in value.items()}
            if isinstance(value, list | tuple):
                return type(value)([taken(each, begin, end) for each in value])
            return value

        def joined(first, *others):
            if isinstance(first, torch.Tensor):
                return torch.cat([torch.atleast_1d(each) for each in (first, *others)])
            if isinstance(first, dict):
                return {key: joined(*(each[key] for each in (first, *others))) for key in first}
            if isinstance(first, list | tuple):
                return type(first)([joined(*each) for each in zip(first, *others, strict=True)])
            return first

        outputs, begin = [], 0
        for length in lengths(batch):
            outputs.append(function(taken(batch, begin, begin + length)))
            begin += length
        return joined(*outputs)

    assert kit.check.exercise_7_3(in_parts) == 1
    assert capsys.readouterr().out == "Exercise 7.3: right for nested batches.\n"


def test_other_ways_to_the_same_dataparallel_are_right():
    def by_hand(module, places):
        return lambda batch: torch.cat([module(chunk) for chunk in batch.chunk(len(places))])

    assert kit.check.exercise_7_c(by_hand) == 1

    def scatter(batch, places):
        length = -(-len(batch) // len(places))
        chunks = [batch[i : i + length] for i in range(0, len(batch), length)]
        copies = [torch.empty_like(c, device=p) for c, p in zip(chunks, places, strict=False)]
        return [chunks[0], *(n.copy_(c) for n, c in zip(copies[1:], chunks[1:], strict=True))]

    assert kit.check.exercise_7_a(scatter) == 1

    def replicate(model, places):
        own = model.state_dict(keep_vars=True)
        return [
            own,
            *({k: v.clone().to(place) for k, v in own.items()} for place in places[1:]),
        ]

    assert kit.check.exercise_7_b(replicate) == 1
