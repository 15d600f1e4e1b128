"""Wrong answers to the exercises of lesson 04, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, solved

import ddp_kit as kit
from ddp_kit.check.record import on_a_wire
from ddp_kit.lessons import ring_allreduce
from ddp_kit.lessons.ring_allreduce import exchange

pytestmark = pytest.mark.usefixtures("forked_ranks")


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


@pytest.mark.parametrize(
    ("right", "wrong", "mistake"),
    [
        ("sends.append(dist.isend(piece, right))", "dist.isend(piece, right)", "sends not kept"),
        ("sends.append(dist.isend(piece, right))", "dist.send(piece, right)", "blocking send"),
        ("if step < 2 * (n - 1) - 1:", "if step < 2 * (n - 1):", "unmatched"),
    ],
)
def test_a_pipeline_that_deadlocks_is_told_why(right, wrong, mistake):
    assert_mistake(kit.check.exercise_4_2, solved("4.2", {right: wrong}), mistake)
