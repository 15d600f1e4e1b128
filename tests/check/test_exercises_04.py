"""Wrong answers to the exercises of lesson 04, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check.record import on_a_wire
from ddp_kit.lessons import ring_allreduce
from ddp_kit.lessons.ring_allreduce import exchange, neighbours

pytestmark = pytest.mark.usefixtures("forked_ranks")


def ring_of(chunks, replace=True):
    """Go round with chunks of one length. replace: replace, not add, in the second half."""
    (rank, n), (left, right) = (dist.get_rank(), dist.get_world_size()), neighbours()
    for step in range(2 * (n - 1)):
        going, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(coming)
        exchange(going, right, arriving, left)
        coming.copy_(arriving if replace and step >= n - 1 else coming + arriving)


def scattering(first=1, own=False, in_place=False, cut=True, twice=False):
    """Return an answer to 4.1. first: how far before its own rank a piece begins."""

    def reduce_scatter(output, pieces):
        (rank, n), (left, right) = (dist.get_rank(), dist.get_world_size()), neighbours()
        passing = pieces[(rank - first) % n]
        for step in range(1, n):
            mine = pieces[(rank - first - step) % n]
            arriving = torch.zeros_like(mine if cut else pieces[0])
            for _ in range(2 if twice else 1):
                exchange(passing, right, arriving, left)
            mine = mine.add_(arriving) if in_place else mine + arriving
            passing = mine
        output.copy_(pieces[rank] if own else passing)

    return reduce_scatter


@pytest.mark.parametrize(
    ("wrong", "name", "facts"),
    [
        (
            {"first": 0},
            "as in the lesson",
            [
                "exercise 4.1, reduce_scatter(output, pieces of lengths [3, 3]) on 2 ranks: wrong",
                "rank 0 should hold [30, 32, 34] in output but holds [36, 38, 40]\n",
            ],
        ),
        (
            {"own": True},
            "own piece",
            ["rank 0 should hold [30, 32, 34] in output but holds [10, 11, 12]\n"],
        ),
        ({"first": -1}, "otherwise", ["on 3 ranks: wrong result"]),
        ({"in_place": True}, "pieces changed", ["rank 0 should hold [[10, 11, 12], [13, 14, 15]]"]),
        ({"cut": False}, "lengths", ["of lengths [2, 0]) on 2 ranks: it deadlocks"]),
        ({"twice": True}, "too many bytes", ["rank 0 sent 24 bytes where 12 would be"]),
    ],
)
def test_a_reduce_scatter_that_is(wrong, name, facts):
    assert_mistake(kit.check.exercise_4_1, scattering(**wrong), name, *facts)


def test_pieces_may_go_straight_to_their_ranks(capsys):
    def reduce_scatter(output, pieces):
        rank, n = dist.get_rank(), dist.get_world_size()
        output.copy_(pieces[rank])
        for distance in range(1, n):
            arriving = torch.empty_like(output)
            dst, src = (rank + distance) % n, (rank - distance) % n
            exchange(pieces[dst], dst, arriving, src)
            output += arriving

    assert kit.check.exercise_4_1(reduce_scatter) == 1
    assert "4.1: right on 1, 2, 3, 4 and 5 ranks, each rank sends" in capsys.readouterr().out


@mistake("4.1", "collective", "on 2 ranks: reduce_scatter was called\n")
def test_a_reduce_scatter_that_calls_it(output, pieces):
    dist.reduce_scatter(output, pieces)


@mistake(
    "4.2",
    "waits for all",
    "pipelined_ring(tensor of shape (60,), pieces=3) on 2 ranks: right, but rank 0",
    "rank 0 waited for 3 pieces before it passed on the first\n",
)
def test_a_pipeline_that_waits_for_all_pieces_of_a_step(tensor, pieces):
    (rank, n), (left, right) = (dist.get_rank(), dist.get_world_size()), neighbours()
    chunks = [chunk.tensor_split(pieces) for chunk in tensor.view(-1).tensor_split(n)]
    for step in range(2 * (n - 1)):
        coming = chunks[(rank - step - 1) % n]
        sends = [dist.isend(piece, right) for piece in chunks[(rank - step) % n]]
        for piece in coming:
            into = torch.empty_like(piece)
            dist.recv(into, left)
            piece.copy_(into if step >= n - 1 else piece + into)
        for sending in sends:
            sending.wait()


@mistake("4.2", "unmatched", "on 2 ranks: it deadlocks\n")
def test_a_pipeline_that_goes_on_in_the_last_step(tensor, pieces):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = [chunk.tensor_split(pieces) for chunk in tensor.view(-1).tensor_split(n)]
    sends = [dist.isend(piece, (rank + 1) % n) for piece in chunks[rank]] if n > 1 else []
    for step in range(2 * (n - 1)):
        for piece in chunks[(rank - step - 1) % n]:
            into = torch.empty_like(piece) if step < n - 1 else piece
            dist.recv(into, (rank - 1) % n)
            if step < n - 1:
                piece += into
            sends.append(dist.isend(piece, (rank + 1) % n))
    for sending in sends:
        sending.wait()


@mistake("4.2", "sent whole", "on 2 ranks: right, but rank 0 sent 2 messages instead of 6\n")
def test_a_pipeline_without_pieces(tensor, pieces):
    ring_allreduce.chunked_ring(tensor)


@mistake("4.2", "wrong chunk", "where number 0 is 40 instead of 30")
def test_a_pipeline_that_goes_on_adding(tensor, pieces):
    ring_of(tensor.view(-1).tensor_split(dist.get_world_size()), replace=False)


def doubling(tensor):
    """Sum a tensor in place on any number of ranks, by recursive doubling."""
    rank, n = dist.get_rank(), dist.get_world_size()
    power, arriving = 1 << (n.bit_length() - 1), torch.empty_like(tensor)
    partner = rank + power if rank < power else rank - power
    if rank >= power:
        dist.send(tensor, partner)
    elif partner < n:
        dist.recv(arriving, partner)
        tensor += arriving
    distance = 1
    while distance < power and rank < power:
        exchange(tensor, rank ^ distance, arriving, rank ^ distance)
        tensor += arriving
        distance *= 2
    if rank >= power:
        dist.recv(tensor, partner)
    elif partner < n:
        dist.send(tensor, partner)


def test_each_wire_may_be_measured_against_its_break_even_point():
    def all_reduce(tensor, alpha, beta):
        large = dist.get_world_size() > 2 and tensor.nbytes * beta > 10 * alpha
        ring_allreduce.chunked_ring(tensor) if large else doubling(tensor)

    assert kit.check.exercise_4_3(all_reduce) == 1


@mistake(
    "4.3",
    "slow if small",
    "all_reduce(tensor of 4,000 bytes, alpha=5e-05, beta=1e-09) on 4 ranks: right, but that takes",
    "takes 0.306 ms on this wire where 0.108 ms would be enough\n",
)
def test_a_ring_for_small_tensors(tensor, alpha, beta):
    ring_allreduce.chunked_ring(tensor)


@mistake(
    "4.3", "slow if large", "beta=1e-06) on 4 ranks: right, but that takes 8.1 ms on this wire"
)
def test_doubling_for_large_tensors(tensor, alpha, beta):
    doubling(tensor)


@mistake("4.3", "slow if large", "of 4,000 bytes, alpha=5e-05, beta=1e-06) on 4 ranks: right")
def test_a_choice_that_does_not_look_at_the_wire(tensor, alpha, beta):
    ring_allreduce.chunked_ring(tensor) if tensor.nbytes > 10_000 else doubling(tensor)


@mistake("4.3", "no partner", "on 6 ranks: it raised an error")
def test_doubling_for_powers_of_two_only(tensor, alpha, beta):
    if dist.get_world_size() > 2 and tensor.nbytes * beta > 10 * alpha:
        return ring_allreduce.chunked_ring(tensor)
    arriving, distance = torch.empty_like(tensor), 1
    while distance < dist.get_world_size():
        partner = dist.get_rank() ^ distance
        exchange(tensor, partner, arriving, partner)
        tensor += arriving
        distance *= 2


@mistake("4.3", "unchanged", "on 4 ranks: wrong result")
def test_a_sum_of_a_copy(tensor, alpha, beta):
    doubling(tensor.clone())


@mistake("4.3", "other sum", "on 4 ranks: wrong result")
def test_a_sum_that_counts_twice(tensor, alpha, beta):
    doubling(tensor)
    doubling(tensor)


def shift(tensor, distance):
    """Return the tensor of the rank at a distance to the left; this rank's goes to the right."""
    rank, n, arriving = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    exchange(tensor, (rank + distance) % n, arriving, (rank - distance) % n)
    return arriving


def test_goals_of_a_sum_in_few_rounds(capsys):
    check = kit.check.exercise_4_4
    for answer, stars in ((ring_allreduce.whole_ring, "★☆☆ 5"), (doubling, "★★☆ 4")):
        credit = check(answer)
        assert f"Exercise 4.4: {stars} rounds; the best known answer has 3." in (
            capsys.readouterr().out
        )
        assert list(credit.parts.values()) == [True, stars.count("★") > 1, False]
    assert (
        str(check(doubling).picture)
        .splitlines()[2]
        .endswith("from 4 to 1, from 1 to 2, from 2 to 4")
    )


def test_all_numbers_may_travel_to_all_ranks(capsys):
    def gather_all(tensor):
        known = tensor[None]
        for distance in (1, 2):
            known = torch.cat([known, shift(known, distance)])
        tensor.copy_(torch.cat([known, shift(known[:2], 4)]).sum(0))

    assert kit.check.exercise_4_4(gather_all) == 1
    assert "★★★ 3 rounds" in capsys.readouterr().out


@mistake("4.4", "no goal", "right, but 10 rounds where at most 6 are the first goal")
def test_a_record_of_a_chunked_ring(tensor):
    ring_allreduce.chunked_ring(tensor)


@mistake("4.4", "counted twice", "rank 0 should hold [")
def test_whole_sums_of_eight_ranks(tensor):
    for distance in (1, 2, 4):
        tensor += shift(tensor, distance)


@mistake("4.4", "numbers missing", "rank 0 should hold [")
def test_two_rounds_of_doubling(tensor):
    for distance in (1, 2):
        tensor += shift(tensor, distance)


@mistake("4.4", "unchanged", "wrong result")
def test_a_record_without_messages(tensor):
    pass


@mistake("4.4", "collective", "all_reduce was called")
def test_a_record_that_calls_all_reduce(tensor):
    dist.all_reduce(tensor)


def test_a_wire_carries_one_message_each_way_at_a_time():
    def worker(rank, world_size):
        room = torch.empty(10)
        if rank == 0:  # two messages out, one in
            works = [dist.isend(torch.ones(10), 1), dist.isend(torch.ones(10), 2)]
            dist.recv(room, 2)
            [work.wait() for work in works]
        elif rank == 2:
            work = dist.isend(torch.ones(10), 0)
            dist.recv(room, 0)
            work.wait()
        else:
            dist.recv(room, 0)

    trace = kit.run(worker, world_size=3).trace
    score = on_a_wire(trace, 1.0, 0.1)
    assert score.value == 10
    assert score.spans == [
        (0, 0, 5, "to 1, from 2"),
        (0, 5, 10, "to 2"),
        (1, 0, 5, "from 0"),
        (2, 0, 5, "to 0"),
        (2, 5, 10, "from 0"),
    ]
