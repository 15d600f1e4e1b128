"""Wrong answers to the exercises of lesson 02, and the errors that the learner gets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import assert_mistake

import ddp_kit as kit


def token(turns):
    """Return an answer to 2.5 that sends a token round the ring this many times."""

    def barrier():
        rank, n, token = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
        for turn in range(turns if n > 1 else 0):
            if rank > 0 or turn > 0:
                dist.recv(token, (rank - 1) % n)
            dist.send(token, (rank + 1) % n)
        if rank == 0 and n > 1:
            dist.recv(token, n - 1)

    return barrier


def test_a_barrier_by_exchange_or_by_a_token_that_goes_round_twice_is_right(capsys):
    def by_exchange():
        rank, n, distance = dist.get_rank(), dist.get_world_size(), 1
        while distance < n:
            sending = dist.isend(torch.zeros(1), (rank + distance) % n)
            dist.recv(torch.zeros(1), (rank - distance) % n)
            sending.wait()
            distance *= 2

    for barrier in (by_exchange, token(turns=2)):
        kit.check.exercise_2_5(barrier)
        assert capsys.readouterr().out == (
            "Exercise 2.5: right on 1, 2, 3, 4 and 5 ranks, nobody leaves before all have come.\n"
        )


def test_a_barrier_by_a_token_that_goes_round_once():
    facts = "barrier() on 3 ranks: ", "rank 1 leaves without having heard of rank 2\n"
    assert_mistake(kit.check.exercise_2_5, token(turns=1), "leaves early", *facts)


def test_a_sort_with_more_samples_passes(capsys):
    def sample_sort(numbers):
        n, numbers = dist.get_world_size(), numbers.sort().values
        samples = numbers[torch.arange(2 * n) * len(numbers) // (2 * n)]
        every = [torch.empty_like(samples) for _ in range(n)]
        dist.all_gather(every, samples)
        splitters = torch.cat(every).sort().values[2 * n :: 2 * n].contiguous()
        target = torch.bucketize(numbers, splitters, right=True)
        going = [numbers[target == rank] for rank in range(n)]
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(n)]
        dist.all_to_all(lengths, [torch.tensor([len(each)]) for each in going])
        coming = torch.empty(int(sum(lengths)))
        splits = [int(length) for length in lengths], [len(each) for each in going]
        dist.all_to_all_single(coming, torch.cat(going), *splits)
        return coming.sort().values

    kit.check.exercise_2_10(sample_sort)
    assert capsys.readouterr().out.startswith("Exercise 2.10: right on 1, 2, 3 and 4 ranks")


def directly(pieces):
    rank, n = dist.get_rank(), dist.get_world_size()
    came = [torch.empty_like(piece) for piece in pieces]
    came[rank] = pieces[rank]
    works = [dist.isend(pieces[dst], dst) for dst in range(n) if dst != rank]
    works += [dist.irecv(came[src], src) for src in range(n) if src != rank]
    for work in works:
        work.wait()
    return came


def test_an_all_to_all_that_reaches_the_first_goal(capsys):
    assert sum(kit.check.exercise_2_11(directly).parts.values()) == 1
    said = capsys.readouterr().out
    assert said == "Exercise 2.11: ★☆☆ 55 µs; the best known answer has 37.\n"
