"""Ring all-reduce: exact sums, and costs as the formulas say."""

from __future__ import annotations

import pytest
import torch

import ddp_kit as kit
from ddp_kit import plot
from ddp_kit.lessons import ring_allreduce

CHUNKED = (ring_allreduce.chunked_ring, ring_allreduce.preposted_ring)
RINGS = (ring_allreduce.whole_ring, *CHUNKED)


def test_rings_are_exact_where_sizes_do_not_divide():
    def all_cases(rank, world_size):
        return [
            (ring.__name__, shape, dtype)
            for ring in RINGS
            for shape in [(), (0,), (1,), (2,), (5,), (7, 3), (1, 1, 13), (1001,)]
            for dtype in [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8]
            if not ring_allreduce.compare(rank, world_size, ring, shape, dtype)
        ]

    for world_size in (1, 2, 3, 4, 5):
        assert not any(kit.run(all_cases, world_size=world_size))


def test_a_kept_scratch_tensor_does_not_change_the_sum():
    def twice(rank, world_size):
        scratch = torch.full((10,), 77.0)
        for _ in range(2):
            tensor = torch.arange(10.0) + rank
            ring_allreduce.preposted_ring(tensor, scratch)
        return tensor.tolist()

    assert kit.run(twice, world_size=3)[1] == [3.0 * i + 3 for i in range(10)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_costs_are_what_the_formulas_say(world_size):
    numel = 12 * 100
    steps = world_size - 1
    for ring in RINGS:
        trace = kit.run(ring_allreduce.count, ring, numel, world_size=world_size).trace
        messages, nbytes = steps, 4 * numel * steps
        if ring in CHUNKED:
            messages, nbytes = 2 * steps, 8 * numel // world_size * steps
        for rank in range(world_size):
            assert len(trace.messages(src=rank)) == messages
            assert trace.bytes_sent(rank) == nbytes
            right = (rank + 1) % world_size
            assert trace.messages(src=rank) == trace.messages(src=rank, dst=right)


def test_small_tensors_are_timed_in_more_rounds_than_large_ones():
    asked = []

    def run(measure, sizes, rounds):
        asked.append((measure, sizes, rounds))
        by_size = {nbytes: [0.001 * rounds, 0.2] for nbytes in sizes}
        slower = {nbytes: [0.1, 0.1] for nbytes in sizes}
        return [{"whole ring": by_size}, {"whole ring": slower}]

    measured = ring_allreduce.samples(run, sizes=(4_000, 400_000, 40_000_000))
    assert [sizes for _, sizes, _ in asked] == [[4_000, 400_000], (40_000_000,)]
    assert [rounds for _, _, rounds in asked] == [15, 5]
    slowest = [0.1, 0.2]  # the slowest rank of each round
    assert measured == {"whole ring": [(4_000, slowest), (400_000, slowest), (40_000_000, slowest)]}


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


def test_a_ring_that_is_too_large_for_one_picture_of_a_step_says_so():
    held = [torch.full((17, 9), 10**rank) for rank in range(9)]
    with pytest.raises(ValueError, match="at most 8 ranks, got 9"):
        plot.ring_step(held, 1)
