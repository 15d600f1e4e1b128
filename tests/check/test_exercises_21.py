"""Wrong answers to the exercises of lesson 21, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check import grader
from ddp_kit.lessons.your_own_backend import ROOM, Finished, SegmentGroup, all_reduce

pytestmark = pytest.mark.usefixtures("forked_ranks")


@mistake(
    "21.1",
    "waits too little",
    "exercise 21.1, barrier(flags, rank, pause) on 2 ranks: rank 0 left barrier 1 before rank 1",
)
def test_a_barrier_that_does_not_wait(flags, rank, pause):
    return


@mistake("21.1", "not counted", "on 2 ranks: rank 1 left barrier 2 before rank 0 had come\n")
def test_a_barrier_that_never_sets_its_flag_back(flags, rank, pause):
    flags[rank] = 1
    while min(flags) < 1:
        pause()


@mistake("21.1", "not counted", "left barrier 2 before")
def test_a_barrier_that_sets_its_flag_back(flags, rank, pause):
    flags[rank] = 1
    while min(flags) < 1:
        pause()
    flags[rank] = 0


@mistake("21.1", "waits too long", "never leaves barrier 1; the flags are [1, 2]\n")
def test_a_barrier_that_waits_for_equal_flags(flags, rank, pause):
    flags[rank] += 1
    while any(flag != flags[rank] for flag in flags):
        pause()


@mistake("21.1", "waits too little", "on 3 ranks: rank 0 left barrier 1 before rank 2 had come\n")
def test_a_barrier_that_waits_for_one_neighbour(flags, rank, pause):
    flags[rank] += 1
    while flags[(rank + 1) % len(flags)] < flags[rank]:
        pause()


@mistake("21.1", "no flag raised", "never leaves barrier 1; the flags are [0, 0]\n")
def test_a_barrier_that_raises_no_flag(flags, rank, pause):
    while min(flags) < 1:
        pause()


@mistake("21.1", "other flag", "rank 0 wrote the flag of rank 1")
def test_a_barrier_that_raises_all_flags(flags, rank, pause):
    for other in range(len(flags)):
        flags[other] += 1


def test_a_barrier_that_never_pauses_is_stopped(monkeypatch):
    def busy(flags, rank, pause):
        flags[rank] += 1
        while min(flags) < flags[rank]:
            pass

    monkeypatch.setattr(grader, "TIMEOUT", 3.0)
    assert_mistake(kit.check.exercise_21_1, busy, "no pause", "it did not finish in time")


def of_two(
    before=True,
    after=True,
    read=lambda slots, rank: slots[1 - rank],
    change=lambda tensor, other: tensor.add_(other),
):
    """Return an answer to 21.2; each argument can make it wrong in one way."""

    def all_reduce_of_two(tensor, slots, rank, barrier):
        slots[rank].copy_(tensor)
        if before:
            barrier()
        change(tensor, read(slots, rank))
        if after:
            barrier()

    return all_reduce_of_two


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("read too early", of_two(before=False)),
        ("written too early", of_two(after=False)),
        ("read too early", of_two(before=False, after=False)),
        ("own slot", of_two(read=lambda slots, rank: slots[rank])),
        ("overwritten", of_two(change=torch.Tensor.copy_)),
        ("unchanged", of_two(change=torch.add)),
        ("other slot", of_two(read=lambda slots, rank: slots[2])),
    ],
)
def test_a_sum_of_two(name, answer):
    start = "exercise 21.2, all_reduce(tensor, slots, rank, barrier) on 2 ranks: "
    assert_mistake(kit.check.exercise_21_2, answer, name, start)


@mistake("21.2", "other sum")
def test_a_sum_in_the_slot(tensor, slots, rank, barrier):
    slots[rank].copy_(tensor)
    barrier()
    slots[0].add_(slots[1])  # both ranks do
    barrier()
    tensor.copy_(slots[0])
    barrier()


@mistake("21.2", "uneven barriers", "waits at a barrier to which not all ranks come\n")
def test_a_sum_for_which_only_rank_0_waits(tensor, slots, rank, barrier):
    of_two(before=rank == 0)(tensor, slots, rank, barrier)


def floor(tensor, n):
    return [tensor[r * (len(tensor) // n) : (r + 1) * (len(tensor) // n)] for r in range(n)]


def ceiling(tensor, n):
    chunks = tensor.chunk(n)
    return [*chunks, *[tensor[:0]] * (n - len(chunks))]


def scattered(
    before=True,
    after=True,
    cut=torch.Tensor.tensor_split,
    choose=lambda rank, n: rank,
    add=lambda chunks: torch.stack(list(chunks)).sum(0),
):
    """Return an answer to 21.3; each argument can make it wrong in one way."""

    def reduce_scatter(tensor, slots, rank, barrier):
        slots[rank].copy_(tensor)
        if before:
            barrier()
        n = len(slots)
        total = add([cut(slot, n)[choose(rank, n)] for slot in slots])
        if after:
            barrier()
        return total

    return reduce_scatter


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("one tensor", scattered(before=False)),
        ("written too early", scattered(after=False)),
        ("numbers left over", scattered(cut=floor)),
        ("torch chunk", scattered(cut=ceiling)),
        ("another chunk", scattered(choose=lambda rank, n: n - 1 - rank)),
        ("whole sum", scattered(cut=lambda slot, n: [slot] * n)),
        ("one tensor", scattered(add=lambda chunks: chunks[0].clone())),
        ("no tensor", scattered(add=lambda chunks: None)),
        ("other shape", scattered(add=lambda chunks: torch.cat(list(chunks)))),
        ("other slot", scattered(choose=lambda rank, n: n)),
        ("other sum", scattered(add=lambda chunks: torch.stack(list(chunks)).mean(0))),
    ],
)
def test_a_chunk(name, answer):
    start = "exercise 21.3, reduce_scatter(tensor, slots, rank, barrier) on "
    assert_mistake(kit.check.exercise_21_3, answer, name, start)


@mistake("21.3", "uneven barriers", "waits at a barrier to which not all ranks come\n")
def test_a_chunk_for_which_only_rank_0_waits(tensor, slots, rank, barrier):
    return scattered(before=rank == 0)(tensor, slots, rank, barrier)


def backend(
    size=lambda tensor: ROOM // tensor.itemsize,
    last=None,
    times=1,
    divide=lambda tensor: False,
    work=True,
):
    """Return an answer to 21.4; each argument can make it wrong in one way."""

    class Backend(SegmentGroup):
        def allreduce(self, tensors, opts=None):
            for tensor in tensors:
                for piece in tensor.detach().view(-1).split(size(tensor))[:last] * times:
                    all_reduce(self.segment, piece)
                if divide(tensor):
                    tensor.div_(self.size())
            return Finished(tensors) if work else None

    return Backend


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("too large pieces", {"size": len}),
        ("too large pieces", {"size": lambda tensor: ROOM}),
        ("first piece only", {"last": 1}),
        ("divided", {"divide": lambda tensor: True}),
        ("only the gradient", {"divide": lambda tensor: tensor.shape == (6,)}),
        ("no work", {"work": False}),
        ("unchanged", {"last": 0}),
        ("other sum", {"times": 2}),
    ],
)
def test_a_backend(name, wrong):
    start = "exercise 21.4, Backend(store, rank, size, timeout) on 2 ranks: "
    assert_mistake(kit.check.exercise_21_4, backend(**wrong), name, start)
