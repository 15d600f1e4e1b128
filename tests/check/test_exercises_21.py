"""Wrong answers to the exercises of lesson 21, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
from answers import error_text

import ddp_kit as kit
from ddp_kit.check import grader
from ddp_kit.lessons.your_own_backend import ROOM, Finished, SegmentGroup, all_reduce

pytestmark = pytest.mark.usefixtures("forked_ranks")


def never_set_back(flags, rank, pause):
    flags[rank] = 1
    while min(flags) < 1:
        pause()


def set_back(flags, rank, pause):
    flags[rank] = 1
    while min(flags) < 1:
        pause()
    flags[rank] = 0


def equal(flags, rank, pause):
    flags[rank] += 1
    while any(flag != flags[rank] for flag in flags):
        pause()


def one_neighbour(flags, rank, pause):
    flags[rank] += 1
    while flags[(rank + 1) % len(flags)] < flags[rank]:
        pause()


def silent(flags, rank, pause):
    while min(flags) < 1:
        pause()


def for_others(flags, rank, pause):
    for other in range(len(flags)):
        flags[other] += 1


@pytest.mark.parametrize(
    ("barrier", "words"),
    [
        (lambda flags, rank, pause: None, "left barrier 1 before rank 1 had come\nRaise flags[ran"),
        (never_set_back, "left barrier 2 before rank 0 had come\nThe flags still have what"),
        (set_back, "left barrier 2 before"),
        (equal, "never leaves barrier 1; the flags are [1, 2]\nA fast rank may be in the next"),
        (one_neighbour, "on 3 ranks: rank 0 left barrier"),
        (silent, "never leaves barrier 1; the flags are [0, 0]\nNo rank has changed its flag"),
        (for_others, "rank 0 wrote the flag of rank 1"),
    ],
)
def test_a_barrier_that_is(barrier, words):
    text = error_text(kit.check.exercise_21_1, barrier)
    assert text.startswith("exercise 21.1, barrier(flags, rank, pause) on ")
    assert words in text


def test_a_barrier_that_never_pauses_is_stopped(monkeypatch):
    def busy(flags, rank, pause):
        flags[rank] += 1
        while min(flags) < flags[rank]:
            pass

    monkeypatch.setattr(grader, "TIMEOUT", 3.0)
    text = error_text(kit.check.exercise_21_1, busy)
    assert "it did not finish in time" in text
    assert "Call pause() each time that you have looked in vain" in text


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


def in_the_slot(tensor, slots, rank, barrier):
    slots[rank].copy_(tensor)
    barrier()
    slots[0].add_(slots[1])  # both ranks do
    barrier()
    tensor.copy_(slots[0])
    barrier()


def only_rank_0_waits(tensor, slots, rank, barrier):
    of_two(before=rank == 0)(tensor, slots, rank, barrier)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (of_two(before=False), "A rank has read a slot before it was written"),
        (
            of_two(after=False),
            "before the other had read this one: wait at a barrier after reading",
        ),
        (of_two(before=False, after=False), "A rank has read a slot before it was written"),
        (of_two(read=lambda slots, rank: slots[rank]), "twice a rank's own tensor"),
        (of_two(change=torch.Tensor.copy_), "That is the tensor of the other rank."),
        (of_two(change=torch.add), "Every rank still holds what it started with."),
        (in_the_slot, "Leave the slots as they are"),
        (only_rank_0_waits, "All ranks must call barrier() equally often"),
        (of_two(read=lambda slots, rank: slots[2]), "slots[r] is the slot of rank r"),
    ],
)
def test_a_sum_of_two_that_is(answer, words):
    text = error_text(kit.check.exercise_21_2, answer)
    assert text.startswith("exercise 21.2, all_reduce(tensor, slots, rank, barrier) on 2 ranks: ")
    assert words in text


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
    ("answer", "words"),
    [
        (scattered(before=False), "A rank has read a slot before it was written"),
        (scattered(after=False), "before the other had read this one"),
        (scattered(cut=floor), "The numbers that are left over belong to a chunk"),
        (scattered(cut=ceiling), "torch.chunk makes all chunks but the last equally long"),
        (scattered(choose=lambda rank, n: n - 1 - rank), "That is the chunk of another rank"),
        (scattered(cut=lambda slot, n: [slot] * n), "That is the whole sum."),
        (scattered(add=lambda chunks: chunks[0].clone()), "That is the chunk of one rank."),
        (scattered(add=lambda chunks: None), "Return this rank's chunk of the sum, a tensor."),
    ],
)
def test_a_chunk_that_is(answer, words):
    text = error_text(kit.check.exercise_21_3, answer)
    assert text.startswith("exercise 21.3, reduce_scatter(tensor, slots, rank, barrier) on ")
    assert words in text


def backend(size=lambda tensor: ROOM // tensor.itemsize, last=None, divide=False, work=True):
    """Return an answer to 21.4; each argument can make it wrong in one way."""

    class Backend(SegmentGroup):
        def allreduce(self, tensors, opts=None):
            for tensor in tensors:
                for piece in tensor.detach().view(-1).split(size(tensor))[:last]:
                    all_reduce(self.segment, piece)
                if divide:
                    tensor.div_(self.size())
            return Finished(tensors) if work else None

    return Backend


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"size": len}, "Cut each tensor into pieces"),
        ({"size": lambda tensor: ROOM}, "counts numbers, of tensor.itemsize bytes"),
        ({"last": 1}, "Only the beginning is summed."),
        ({"divide": True}, "That is the mean. PyTorch asks for the sum"),
        ({"work": False}, "return Finished(tensors)"),
        ({"last": 0}, "Every rank still holds what it started with."),
    ],
)
def test_a_backend_that_is(wrong, words):
    text = error_text(kit.check.exercise_21_4, backend(**wrong))
    assert text.startswith("exercise 21.4, Backend(store, rank, size, timeout) on 2 ranks: ")
    assert words in text
