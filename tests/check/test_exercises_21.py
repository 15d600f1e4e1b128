"""Wrong answers to the exercises of lesson 21, and the errors that the learner gets."""

from __future__ import annotations

import time
from itertools import count

import pytest
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check import grader

pytestmark = pytest.mark.usefixtures("forked_ranks")


@mistake("21.1", "otherwise", "on 3 ranks: ", "left before rank 2 had come")
def test_a_barrier_that_waits_for_one_neighbour(flags, rank, pause):
    flags[rank] += 1
    while flags[(rank + 1) % len(flags)] < flags[rank]:
        pause()


def test_a_barrier_that_never_pauses_is_stopped(monkeypatch):
    def busy(flags, rank, pause):
        flags[rank] += 1
        while min(flags) < flags[rank]:
            pass

    monkeypatch.setattr(grader, "TIMEOUT", 3.0)
    assert_mistake(kit.check.exercise_21_1, busy, "no pause", "it did not finish in time")


class Finds:
    """Flags that look for all missing lines at once, in another way than the solution."""

    def __init__(self, memory, count, limit, pause):
        self.numbers, self.limit, self.pause = [0] * count, limit, pause

    def __getitem__(self, line):
        return self.numbers[line]

    def __setitem__(self, line, number):
        self.numbers[line] = number

    def wait(self, lines, number, what):
        start = time.monotonic()
        for looks in count(1):
            missing = [line for line in lines if not self[line] >= number]
            if not missing:
                return
            if time.monotonic() - start > self.limit:
                raise RuntimeError(f"waited {self.limit:g} s for {what} {missing}")
            self.pause(looks)


def gathered(segment, outputs, inputs):
    """All to all in which each slot has what is for one rank after the other, and no parts."""
    me, size, slots = segment.rank, segment.size, segment.slots
    part = slots.shape[1] // size
    rounds = -(-max(len(tensor) for tensor in inputs) // part)
    slots[me, me] = rounds
    segment.barrier()
    rounds = int(max(slots[rank, rank] for rank in range(size)))
    segment.barrier()
    for number in range(rounds):
        here = slice(number * part, (number + 1) * part)
        for dst in range(size):
            slots[me, : len(inputs[dst][here]) * size][dst::size] = inputs[dst][here]
        segment.barrier()
        for src in range(size):
            outputs[src][here] = slots[src, : len(outputs[src][here]) * size][me::size]
        segment.barrier()


def test_other_right_answers_pass():
    kit.check.exercise_21_a(Finds)
    kit.check.exercise_21_10(gathered)


def in_chunks(segment, tensor):
    """The lesson's sum, on two sockets."""
    me, chunks = segment.rank, tensor.split(len(tensor) // 8)
    starts, others = range(0, len(tensor), len(chunks[0])), [r for r in range(8) if r != me]
    for owner in others:
        segment.write(me, starts[owner], chunks[owner])
    segment.barrier()
    for rank in others:
        chunks[me].add_(segment.read(rank, starts[me], len(chunks[0])))
    segment.write(me, starts[me], chunks[me])
    segment.barrier()
    for owner in others:
        chunks[owner].copy_(segment.read(owner, starts[owner], len(chunks[0])))


def each_reads_all(segment, tensor):
    segment.write(segment.rank, 0, tensor)
    segment.barrier()
    for rank in range(8):
        if rank != segment.rank:
            tensor += segment.read(rank, 0, len(tensor))


def test_the_first_goal_of_a_sum_on_two_sockets(capsys):
    assert sum(kit.check.exercise_21_11(in_chunks).parts.values()) == 1
    said = capsys.readouterr().out
    assert said == "Exercise 21.11: ★☆☆ 990 µs; the best known answer has 735.\n"


def test_a_sum_on_two_sockets_that_reaches_no_goal():
    fact = "right, but 3,220 µs where at most 1,000 are the first goal"
    assert_mistake(kit.check.exercise_21_11, each_reads_all, "no goal", fact)


@mistake("21.11", "race", "rank 0 writes into slot 0 what rank 1 reads there\n")
def test_a_sum_that_is_read_too_early(segment, tensor):
    before, segment.barrier = segment.barrier, lambda: None
    each_reads_all(segment, tensor)
    before()


@mistake("21.11", "uneven barriers", "a rank waits for the others forever\n")
def test_a_sum_with_a_barrier_for_one_rank(segment, tensor):
    each_reads_all(segment, tensor)
    if segment.rank == 3:
        segment.barrier()


@mistake("21.11", "one socket")
def test_a_sum_over_each_socket(segment, tensor):
    segment.write(segment.rank, 0, tensor)
    segment.barrier()
    for rank in range(8):
        if rank // 4 == segment.rank // 4 and rank != segment.rank:
            tensor += segment.read(rank, 0, len(tensor))


@mistake("21.11", "unchanged")
def test_a_sum_that_is_kept_elsewhere(segment, tensor):
    each_reads_all(segment, tensor.clone())


@mistake("21.11", "other sum")
def test_a_sum_that_is_counted_twice(segment, tensor):
    each_reads_all(segment, tensor)
    tensor *= 2


@mistake("21.11", "collective", "all_reduce was called")
def test_a_sum_outside_the_segment(segment, tensor):
    work = dist.all_reduce(tensor, async_op=True)
    segment.barrier()
    work.wait()
