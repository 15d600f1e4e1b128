"""ZeRO by hand and PyTorch's own: values, bits, bytes and memory, and what is easily wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons import zero

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_a_flat_parameter_is_filled_up_and_its_parameters_are_views_of_it():
    def worker(rank, world_size):
        parameters = [nn.Parameter(torch.full((5, 2), 2.0)), nn.Parameter(torch.tensor(3.0))]
        flat = zero.FlatParameter(parameters)
        flat.flat.add_(1)
        return flat.flat.tolist(), flat.shard.tolist(), [p.detach() for p in parameters]

    for rank, (flat, shard, values) in enumerate(kit.run(worker, world_size=3)):
        assert flat == [3.0] * 10 + [4.0, 1.0]
        assert shard == flat[4 * rank :][:4]
        assert [value.unique().tolist() for value in values] == [[3.0], [4.0]]


def test_each_rank_holds_what_the_formula_says():
    n = 4
    states, whole = 8 * 111_232, 4 * 111_232
    for way, stage in {
        zero.Replicated: 0,
        zero.Stage1: 1,
        zero.ZeroRedundancy: 1,
        zero.Stage2: 2,
        zero.Stage3: 3,
        zero.FullySharded: 3,
    }.items():
        held = [rank["held"] for rank in kit.run(zero.learn, way, 2, world_size=n)]
        wanted = {"optimizer states": states, "gradients": whole, "parameters": whole}
        for place, kind in enumerate(wanted):
            each = [rank[kind] for rank in held]
            share = wanted[kind] / (n if place < stage else 1)
            assert sum(each) / n == pytest.approx(share, rel=0.02), (way, kind)
        assert {rank["gathered parameters"] for rank in held} == {0}


@pytest.mark.parametrize("way", [zero.Stage3, zero.Prefetching])
def test_a_rank_has_the_rest_and_one_block_and_one_more_on_its_way(way):
    coming = (lambda name: name) if way is zero.Prefetching else lambda name: ""
    for notes in kit.run(zero.watch, way, world_size=2):
        assert [note[:3] for note in notes] == [
            ("forward rest", "rest", coming("block 0")),
            ("forward block 0", "rest, block 0", coming("block 1")),
            ("forward block 1", "rest, block 1", ""),
            ("backward rest", "rest", coming("block 1")),
            ("backward block 1", "rest, block 1", coming("block 0")),
            ("backward block 0", "rest, block 0", ""),
        ]
        most = max(held["gathered parameters"] for *_, held in notes)
        rest, block = 4 * 12_416, 4 * 49_408
        assert most == rest + block * (2 if way is zero.Prefetching else 1)
