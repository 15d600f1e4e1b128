"""Collectives: the reference answers, and a true sub-group."""

from __future__ import annotations

import torch

import ddp_kit as kit
from ddp_kit.lessons import collectives


def test_the_reference_is_worked_out_by_hand():
    held = [torch.tensor([0.0, 1.0]), torch.tensor([10.0, 11.0])]
    after = {
        name: [None if want is None else collectives._flat(want) for want in answer]
        for name in [worker.__name__ for worker in collectives.COLLECTIVES]
        for answer in [collectives.reference(name, held)]
    }
    assert after == {
        "broadcast": [[0, 1], [0, 1]],
        "scatter": [[0], [1]],
        "gather": [[0, 10], None],
        "reduce": [[10, 12], None],
        "all_reduce": [[10, 12], [10, 12]],
        "all_gather": [[0, 10], [0, 10]],
        "reduce_scatter": [[10], [12]],
        "all_to_all": [[0, 10], [1, 11]],
        "all_reduce_in_a_group": [[0, 1], [10, 11]],
    }
    ops = {op: collectives.reference("all_reduce", held, op)[0].tolist() for op in collectives.OPS}
    assert ops == {
        "SUM": [10, 12],
        "PRODUCT": [0, 11],
        "MAX": [10, 11],
        "MIN": [0, 1],
        "AVG": [5, 6],
    }


def test_a_wrong_answer_does_not_agree():
    result = kit.run(collectives.all_reduce, "MAX", world_size=2)
    held = [collectives.own_tensor(rank, 2) for rank in range(2)]
    assert collectives.agrees(result, collectives.reference("all_reduce", held, "MAX"))
    assert not collectives.agrees(result, collectives.reference("all_reduce", held, "SUM"))


def test_the_group_is_a_true_subset():
    result = kit.run(collectives.all_reduce_in_a_group)
    assert [value["after"][0].item() for value in result] == [20, 10, 20, 30]


def test_any_rank_can_be_the_root():
    held = [collectives.own_tensor(rank, 3) for rank in range(3)]
    for worker in collectives.WITH_ROOT:
        op = ["SUM"] if worker in collectives.WITH_OP else []
        result = kit.run(worker, *op, 2, world_size=3)
        name = worker.__name__
        assert collectives.agrees(result, collectives.reference(name, held, root=2)), name
