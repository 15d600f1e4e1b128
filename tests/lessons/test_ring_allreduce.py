"""Ring all-reduce: exact sums, and costs as the formulas say."""

from __future__ import annotations

import pytest
import torch

import ddp_kit as kit
from ddp_kit import model, plot
from ddp_kit.lessons import ring_allreduce

CHUNKED = (ring_allreduce.chunked_ring, ring_allreduce.preposted_ring)
RINGS = (ring_allreduce.whole_ring, *CHUNKED)


def test_a_kept_scratch_tensor_does_not_change_the_sum():
    def twice(rank, world_size):
        scratch = torch.full((10,), 77.0)
        for _ in range(2):
            tensor = torch.arange(10.0) + rank
            ring_allreduce.preposted_ring(tensor, scratch)
        return tensor.tolist()

    assert kit.run(twice, world_size=3)[1] == [3.0 * i + 3 for i in range(10)]


def test_the_slowest_rank_of_each_round_counts():
    def run(measure, sizes, rounds):
        assert measure is ring_allreduce.measure
        quick, slow = ([0.1, 0.3][:rounds], [0.2, 0.2][:rounds])
        return [{"whole ring": dict.fromkeys(sizes, each)} for each in (quick, slow)]

    measured = ring_allreduce.samples(run, sizes=(4_000, 400_000), rounds=2)
    assert measured == {"whole ring": [(4_000, [0.2, 0.3]), (400_000, [0.2, 0.3])]}


@pytest.mark.parametrize("n", [3, 4, 8, 100])
def test_both_rings_take_the_same_time_at_the_break_even_point(n):
    equal = ring_allreduce.break_even(n, 50e-6, 1e-10)
    whole, chunked = (
        cost(n, equal, 50e-6, 1e-10) for cost in (model.naive_ring, model.chunked_ring)
    )
    assert whole == pytest.approx(chunked)
    assert ring_allreduce.break_even(2, 50e-6, 1e-10) == float("inf")


def test_the_rings_of_the_lesson_are_as_exact_as_the_built_in_one():
    """And only the whole ring leaves other bits on each rank."""

    def errors(rank, world_size, ring):
        brought = [
            torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(world_size)
        ]
        exact, mine = sum(each.double() for each in brought), brought[rank].clone()
        ring(mine)
        return (mine - exact).abs().max().item(), mine

    largest = {}
    for ring in (*RINGS, torch.distributed.all_reduce):
        found = list(kit.run(errors, ring))
        largest[ring] = max(error for error, _ in found)
        alike = all(torch.equal(mine, found[0][1]) for _, mine in found)
        assert alike == (ring is not ring_allreduce.whole_ring)
    assert max(largest.values()) < 4 * min(largest.values())


def test_a_step_shows_the_messages_that_travelled_in_it():
    result = kit.run(ring_allreduce.watch, world_size=2)
    assert [repr(plot.ring_step(result, step)) for step in (0, 1, 2)] == [
        "Ring all-reduce on 2 ranks, before the first step\n"
        "        chunks  received\n"
        "rank 0  1 1     -\n"
        "rank 1  10 10   -",
        "Ring all-reduce on 2 ranks, step 1 of 2: reduce-scatter 1\n"
        "        chunks  received\n"
        "rank 0  1 11*   8 B from rank 1\n"
        "rank 1  11* 10  8 B from rank 0",
        "Ring all-reduce on 2 ranks, step 2 of 2: all-gather 1\n"
        "        chunks  received\n"
        "rank 0  11* 11  8 B from rank 1\n"
        "rank 1  11 11*  8 B from rank 0",
    ]
    with pytest.raises(ValueError, match="step must be from 0 to 2, got 3"):
        plot.ring_step(result, 3)
    with pytest.raises(TypeError, match=r"an error with a \.trace"):
        plot.ring_step(list(result), 1)
