"""Partitioned SGD: the parts of the digits, and what averaging does to the replicas."""

from __future__ import annotations

import pytest
import torch

import ddp_kit as kit
from ddp_kit.lessons import partitioned_sgd

WORLD_SIZES = (1, 2, 3, 4)


def test_partitions_are_disjoint_and_the_same_everywhere():
    parts = partitioned_sgd.DataPartitioner(range(100), [0.5, 0.25, 0.25]).partitions
    assert [len(part) for part in parts] == [50, 25, 25]
    assert sorted(index for part in parts for index in part) == list(range(100))
    again = partitioned_sgd.DataPartitioner(range(100), [0.5, 0.25, 0.25]).partitions
    assert parts == again
    assert parts[0] != list(range(50))


def test_the_network_has_as_many_parameters_as_it_says():
    assert sum(p.numel() for p in partitioned_sgd.Net().parameters()) == 21_840


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_both_ways_of_averaging_give_the_batch_gradient(world_size):
    whole = partitioned_sgd.whole_batch_gradient(32 * world_size)
    for average in (partitioned_sgd.average_gradients, partitioned_sgd.average_gradients_flat):
        result = kit.run(partitioned_sgd.mean_gradient, 32, average, world_size=world_size)
        for gradient in result:
            torch.testing.assert_close(gradient, whole, atol=1e-6, rtol=0)


def test_without_averaging_the_gradients_differ():
    whole = partitioned_sgd.whole_batch_gradient(64)
    result = kit.run(
        partitioned_sgd.mean_gradient, 32, partitioned_sgd.keep_gradients, world_size=2
    )
    assert (result[0] - whole).abs().max() > 1e-3


def test_replicas_drift_without_averaging():
    result = kit.run(partitioned_sgd.train, 1, partitioned_sgd.keep_gradients, world_size=2)
    assert not torch.equal(result[0]["parameters"], result[1]["parameters"])


def test_main_says_which_mistake_it_is_where_gradients_are_summed(monkeypatch):
    monkeypatch.setattr(partitioned_sgd, "mean_gradient", summed_gradient)
    whole = partitioned_sgd.flat([torch.arange(9.0)])
    monkeypatch.setattr(partitioned_sgd, "whole_batch_gradient", lambda count: whole)
    with pytest.raises(kit.ProofError, match="It is 2 times the reference: it was summed"):
        partitioned_sgd.main(["--world-size", "2"])


def summed_gradient(rank, world_size):
    return world_size * torch.arange(9.0)
