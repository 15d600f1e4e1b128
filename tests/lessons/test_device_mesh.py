"""Placements by hand and as DTensors: values, collectives, bytes, meshes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import ddp_kit as kit
from ddp_kit.lessons import device_mesh as mesh

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_lengths_are_those_of_chunk():
    for length, n in itertools.product(range(10), range(1, 6)):
        chunks = [len(chunk) for chunk in torch.arange(length).chunk(n)]
        assert mesh.lengths(length, n) == (chunks + [0] * n)[:n]


def test_bytes_are_worked_out_by_hand():
    shape, whole = (6, 3), 4 * 18
    sent = {
        (repr(before), repr(after)): mesh.bytes_sent(before, after, shape, 3)
        for before, after in mesh.CHANGES
    }
    once = 2 / 3 * whole
    assert sent == {
        ("Shard(dim=0)", "Shard(dim=1)"): once,
        ("Shard(dim=1)", "Shard(dim=0)"): once,
        ("Shard(dim=0)", "Replicate()"): once,
        ("Shard(dim=1)", "Replicate()"): once,
        ("Replicate()", "Shard(dim=0)"): 0,
        ("Replicate()", "Shard(dim=1)"): 0,
        ("Partial(sum)", "Shard(dim=0)"): once,
        ("Partial(sum)", "Shard(dim=1)"): once,
        ("Partial(sum)", "Replicate()"): 2 * once,
    }
    assert mesh.bytes_sent(Shard(0), Shard(1), shape, 3, all_to_all=True) == once / 3
    assert mesh.bytes_sent(Shard(0), Replicate(), shape, 3, itemsize=2) == once / 2
    # Five rows on four ranks: each one sends as if there were eight.
    assert mesh.bytes_sent(Shard(0), Replicate(), (5, 3), 4) == 3 / 4 * 4 * 8 * 3
    assert mesh.bytes_sent(Partial(), Replicate(), (5, 3), 4) == 2 * 3 / 4 * 4 * 5 * 3


def test_a_change_in_a_group_stays_in_it():
    def worker(rank, world_size):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = pairs[rank // 2]
        mine = torch.full((1, 2), 10.0**rank)
        whole = mesh.shard_to_replicate(mine, 0, 2, group)
        turned = mesh.shard_to_shard(mine, 0, 1, 2, group)
        total = mesh.partial_to_shard(whole, 0, group)
        return whole.tolist(), turned.tolist(), total.tolist()

    low, high = [[1.0] * 2, [10.0] * 2], [[100.0] * 2, [1000.0] * 2]
    assert list(kit.run(worker, world_size=4)) == [
        (low, [[1.0], [10.0]], [[2.0, 2.0]]),
        (low, [[1.0], [10.0]], [[20.0, 20.0]]),
        (high, [[100.0], [1000.0]], [[200.0, 200.0]]),
        (high, [[100.0], [1000.0]], [[2000.0, 2000.0]]),
    ]


def test_a_factor_with_fewer_rows_than_ranks_is_gathered_first():
    result = kit.run(mesh.product, Shard(0), Replicate(), 2, world_size=3)
    assert [placement for placement, *_ in result] == ["Replicate()"] * 3
    assert mesh.collectives(result.trace)[-1] == "all_gather_into_tensor"


def test_the_warning_about_all_to_all_is_silent(capfd):
    with kit.WorkerPool(2) as pool:  # whose ranks have not given it yet
        pool.run(mesh.by_dtensor, Shard(0), Shard(1), 4, 4)
    assert capfd.readouterr() == ("", "")


def test_ranks_that_do_not_fill_a_mesh_are_refused():
    with pytest.raises(kit.RankError, match="ValueError: 3 ranks cannot fill a mesh of 2 rows"):
        kit.run(mesh.mesh_groups, 2, world_size=3)


def test_a_redistribute_that_one_rank_skips_is_explained_with_its_line():
    def worker(rank, world_size):
        line = init_device_mesh("cpu", (world_size,))
        tensor = DTensor.from_local(torch.ones(2), line, [Shard(0)])
        if rank == 0:
            print(tensor.full_tensor())

    with pytest.raises(kit.DeadlockError) as caught:
        kit.run(worker, world_size=2)
    text = str(caught.value)
    assert text.startswith("rank 0 waits in full_tensor all_gather_into_tensor for rank 1, which")
    assert "print(tensor.full_tensor())" in text
