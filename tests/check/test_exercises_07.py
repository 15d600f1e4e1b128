"""Wrong answers to the exercises of lesson 07, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import error_text

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
    ("wrong", "words"),
    [
        ({"first": 0}, "Rank 0 keeps its own shard, and sends one message to every other rank."),
        (
            {"cut": lambda batch, sizes: batch.chunk(len(sizes))},
            "Rank 0 keeps its own shard, and sends one message to every other rank.",
        ),
        ({"whole": True}, "on 2 ranks: right, but 36 bytes were sent where 12 would be enough"),
    ],
)
def test_a_scatter_that_is(wrong, words):
    text = error_text(kit.check.exercise_7_1, scattering(**wrong))
    assert text.startswith("exercise 7.1, scatter_batch(batch, [")
    assert words in text


def test_a_scatter_that_broadcasts():
    def scatter_batch(batch, sizes, width):
        batch = torch.empty(sum(sizes), width) if batch is None else batch
        dist.broadcast(batch, src=0)
        return batch.split(sizes)[dist.get_rank()]

    text = error_text(kit.check.exercise_7_1, scatter_batch)
    assert "on 2 ranks: broadcast was called\nBuild this one from send and recv" in text


def test_shards_in_another_order():
    def scatter_batch(batch, sizes, width):
        return scattering()(batch if batch is None else batch.flip(0), sizes, width)

    text = error_text(kit.check.exercise_7_1, scatter_batch)
    assert "rank 1 should return [6, 7, 8] but returns [0, 1, 2]\n" in text
    assert text.endswith("Rank 0 gets the first rows, rank 1 those that follow, and so on.")


def test_shards_that_are_cut_in_other_places():
    def scatter_batch(batch, sizes, width):
        return scattering()(batch, sizes[::-1], width)

    text = error_text(kit.check.exercise_7_1, scatter_batch)
    assert text.endswith("cut in other places: sizes[r] is the number for rank r.")


@pytest.mark.parametrize("value", [None, torch.tensor(5.0), torch.zeros(2)])
def test_a_scatter_that_returns_something_else(value):
    def scatter_batch(batch, sizes, width):
        scattering()(batch, sizes, width)
        return value

    text = error_text(kit.check.exercise_7_1, scatter_batch)
    assert text.endswith("Every rank returns its own shard, of shape (sizes[rank], width).")


def test_shards_of_different_widths():
    def scatter_batch(batch, sizes, width):
        return scattering()(batch, sizes, width)[:, : 1 + dist.get_rank()]

    text = error_text(kit.check.exercise_7_1, scatter_batch)
    assert "rank 0 should return [0, 1, 2, 3, 4, 5] but returns [0, 3] (float32 of shape" in text
    assert text.endswith("Every rank returns its own shard, of shape (sizes[rank], width).")


@pytest.mark.parametrize(
    ("part_of_loss", "words"),
    [
        (
            lambda outputs, targets, total: F.mse_loss(outputs, targets),
            "That is the sum of the shards' means",
        ),
        (
            lambda outputs, targets, total: F.mse_loss(outputs, targets) / dist.get_world_size(),
            "That is the mean of the shards' means",
        ),
        (
            lambda outputs, targets, total: F.mse_loss(outputs, targets, reduction="sum"),
            "That is the sum over all examples.",
        ),
        (
            lambda outputs, targets, total: (outputs - targets).sum() / total,
            "The loss of a batch is the mean over its `total` examples of (output - target) ** 2.",
        ),
        (lambda outputs, targets, total: None, "Return one number, a tensor"),
        (lambda outputs, targets, total: 1.5, "Return one number, a tensor that is computed from"),
        (lambda outputs, targets, total: outputs, "Return one number, a tensor"),
    ],
    ids=["own mean", "mean of means", "sum", "not squared", "nothing", "a float", "not a number"],
)
def test_a_part_that_is(part_of_loss, words):
    text = error_text(kit.check.exercise_7_2, part_of_loss)
    assert text.startswith("exercise 7.2, part_of_loss(outputs, targets, total) for shards of [2, ")
    assert words in text
