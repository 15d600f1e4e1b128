"""Partitioned SGD: the parts of the digits, and what averaging does to the replicas."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Subset

import ddp_kit as kit
from ddp_kit.lessons import partitioned_sgd


def test_partitions_are_disjoint_and_the_same_everywhere():
    parts = partitioned_sgd.DataPartitioner(range(100), [0.5, 0.25, 0.25]).partitions
    assert [len(part) for part in parts] == [50, 25, 25]
    assert sorted(index for part in parts for index in part) == list(range(100))
    again = partitioned_sgd.DataPartitioner(range(100), [0.5, 0.25, 0.25]).partitions
    assert parts == again
    assert parts[0] != list(range(50))


def test_the_first_digits_are_those_of_the_dataset():
    images, labels = partitioned_sgd.as_batch(Subset(kit.mnist(), range(300)))
    for mine, theirs in zip(partitioned_sgd.first_digits(300), (images, labels), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_without_averaging_the_gradients_differ():
    whole = partitioned_sgd.whole_batch_gradient(64)
    keep = partitioned_sgd.keep_gradients
    result = kit.run(partitioned_sgd.mean_gradient, keep, world_size=2)
    assert (result[0] - whole).abs().max() > 1e-3


def test_the_loss_of_the_whole_batch_counts_digits_and_not_ranks():
    """Three ranks have 43, 43 and 42 of the 128 digits."""
    one, three = (
        kit.run(partitioned_sgd.first_steps, 0.03, partitioned_sgd.keep_gradients, 1, world_size=n)
        for n in (1, 3)
    )
    assert [rank["losses"] for rank in three] == [pytest.approx(one[0]["losses"], rel=1e-6)] * 3


def test_an_epoch_of_all_digits_has_the_tutorials_batches(monkeypatch):
    asked = []

    def mnist(full):
        asked.append(full)
        return [(torch.zeros(1, 28, 28), 0)] * 640

    monkeypatch.setattr(kit, "mnist", mnist)
    batches = partitioned_sgd.partition_dataset(3, 4, full=True)
    assert asked == [True]
    assert (len(batches), batches.batch_size) == (5, 32)
