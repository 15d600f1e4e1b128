"""Pipelines by hand and PyTorch's own: orders, bits, bytes and deadlocks."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions
from ddp_kit.lessons import pipeline_parallel as pp
from ddp_kit.lessons.zero import SGD

pytestmark = pytest.mark.usefixtures("forked_ranks")

SCHEDULES = (*pp.BY_HAND, *pp.PYTORCH)


def orders(schedule, p, m):
    """Return the steps of each rank of a pipeline by hand."""
    return [
        [(kind, i, rank) for kind, i in pp.order(pp.BY_HAND[schedule](rank, p, m), m)]
        for rank in range(p)
    ]


def steps_of(result):
    return pp.steps_of(rank["cells"] for rank in result)


def text(steps):
    return " ".join(f"{kind}{i}" for kind, i, _ in steps)


def test_the_orders_are_worked_out_by_hand():
    assert list(map(text, orders("GPipe", 2, 3))) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert list(map(text, orders("1F1B", 3, 4))) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert list(map(text, orders("1F1B", 3, 1))) == ["F0 B0"] * 3  # fewer micro-batches than ranks


@pytest.mark.parametrize("schedule", pp.BY_HAND)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_bubble_is_that_of_the_formula(schedule, p):
    for m in (1, 2, 3, 4, 8):
        cells = pp.simulate(orders(schedule, p, m))
        assert pp.bubble(cells) == pytest.approx((p - 1) / (m + p - 1))
        assert max(c.end for rank in cells for c in rank) == 3 * (m + p - 1)


def test_a_swapped_pair_is_found_without_ranks():
    swapped = orders("1F1B", 2, 2)
    swapped[0][1:3] = reversed(swapped[0][1:3])
    assert text(swapped[0]) == "F0 B0 F1 B1"  # no deadlock: rank 1 needs nothing else before B0
    pp.simulate(swapped)
    swapped[1][1:3] = reversed(swapped[1][1:3])
    with pytest.raises(ValueError, match="rank 0 waits for B0 of stage 1, rank 1 waits for F1 of"):
        pp.simulate(swapped)
    split = [[("F", 0, 0), ("I", 0, 0)], [("I", 0, 1), ("F", 0, 1)]]
    with pytest.raises(ValueError, match="rank 0 waits for I0 of stage 1, rank 1 waits for F0 of"):
        pp.simulate(split)


@pytest.fixture(scope="module")
def runs():
    """Return what four ranks did with each schedule, in one run."""

    def worker(rank, world_size):
        torch.set_num_threads(1)
        options = {"optimizer_cls": SGD, "steps": 2, "sequences": 8}
        return {name: pp.train(rank, world_size, name, 8, **options) for name in SCHEDULES}

    result = kit.run(worker, world_size=4)
    return {name: [rank[name] for rank in result] for name in SCHEDULES}


def test_each_rank_does_what_its_schedule_says(runs):
    for name in pp.BY_HAND:
        assert steps_of(runs[name]) == orders(name, 4, 8)
    assert steps_of(runs["ScheduleGPipe"]) == orders("GPipe", 4, 8)
    assert steps_of(runs["Schedule1F1B"]) == orders("1F1B", 4, 8)
    kinds = {name: {kind for rank in steps_of(runs[name]) for kind, *_ in rank} for name in runs}
    assert kinds["ScheduleInterleaved1F1B"] == {"F", "B"}
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
        assert {"F", "I", "W"} <= kinds[name]
    stages = [{stage for *_, stage in rank} for rank in steps_of(runs["ScheduleZBVZeroBubble"])]
    assert stages == [{0, 7}, {1, 6}, {2, 5}, {3, 4}]


def test_the_order_that_exercise_17_4_wants_is_pytorchs(runs):
    interleaved = defined("17.4", solutions()["17.4"]["program"], "interleaved")
    wanted = [interleaved(rank, 4, 2, 8) for rank in range(4)]
    steps = steps_of(runs["ScheduleInterleaved1F1B"])
    assert [list(map(tuple, rank)) for rank in steps] == wanted


def test_the_bubble_shrinks_from_schedule_to_schedule(runs):
    best = {name: round(pp.bubble(pp.simulate(steps_of(runs[name]))), 4) for name in runs}
    assert best["GPipe"] == best["1F1B"] == best["Schedule1F1B"] == round(3 / 11, 4)
    assert best["ScheduleInterleaved1F1B"] == round(3 / 19, 4)  # (p - 1) / (v m + p - 1)
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
        assert best[name] == round(1 / 17, 4)  # 3 of 51 halves of a forward


def held(steps):
    """Return how many stages' micro-batches a rank holds at most."""
    return max(accumulate({"F": 1, "I": 0}.get(kind, -1) for kind, *_ in steps))


def test_each_rank_holds_as_many_halves_as_the_lesson_says(runs):
    assert list(map(held, steps_of(runs["ScheduleInterleaved1F1B"]))) == [11, 9, 7, 5]
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
        assert list(map(held, steps_of(runs[name]))) == [8] * 4


def test_uneven_pieces_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match="24 sequences cannot be cut into 5 equal micro-batches"):
        pp.train(0, 1, "ScheduleInterleaved1F1B", 5)
