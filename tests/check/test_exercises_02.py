"""Wrong answers to the exercises of lesson 02, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions
from ddp_kit.lessons.ring_allreduce import exchange, neighbours


@mistake(
    "2.1",
    "always rank 0",
    "exercise 2.1, broadcast(tensor, src=1) on 2 ranks: wrong result\n"
    "rank 0 should hold [20, 21, 22, 23, 24] but holds [10, 11, 12, 13, 14]\n",
)
def test_a_broadcast_that_always_comes_from_rank_0(tensor, src):
    if dist.get_rank() == 0:
        for dst in range(1, dist.get_world_size()):
            dist.send(tensor, dst)
    else:
        dist.recv(tensor, 0)


@mistake(
    "2.1",
    "",
    "broadcast(tensor, src=1) on 2 ranks: it raised an error\nrank 0 raised ValueError: ",
    "ValueError: a rank cannot receive from itself: src is its own rank\n",
)
def test_a_broadcast_that_all_receive_from_rank_0(tensor, src):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == src:
        for dst in set(range(n)) - {src}:
            dist.send(tensor, dst)
    else:
        dist.recv(tensor, 0)


@mistake(
    "2.1",
    "unchanged",
    "src=0) on 2 ranks: wrong result\nrank 1 should hold [10, 11, 12, 13, 14]",
)
def test_a_broadcast_that_receives_into_another_tensor(tensor, src):
    for dst in set(range(dist.get_world_size())) - {src}:
        if dist.get_rank() == src:
            dist.send(tensor, dst)
        elif dist.get_rank() == dst:
            tensor = torch.empty_like(tensor)
            dist.recv(tensor, src)


@mistake("2.1", "received twice", "right, but 40 bytes were sent where 20 would be enough\n")
def test_a_broadcast_that_comes_twice(tensor, src):
    for dst in [*set(range(dist.get_world_size())) - {src}] * 2:
        if dist.get_rank() == src:
            dist.send(tensor, dst)
        elif dist.get_rank() == dst:
            dist.recv(tensor, src)


@mistake("2.1", "collective", "on 2 ranks: broadcast was called\n")
def test_a_broadcast_that_calls_broadcast(tensor, src):
    dist.broadcast(tensor, src)


@mistake(
    "2.1",
    "",
    "broadcast(tensor, src=0) on 1 rank: it raised an error\nrank 0 raised ValueError:",
    " of test_a_broadcast_that_fails_on_one_rank: dist.send(tensor, (src + 1 + step) % n)",
)
def test_a_broadcast_that_fails_on_one_rank(tensor, src):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == src:
        for step in range(max(1, n - 1)):
            dist.send(tensor, (src + 1 + step) % n)
    else:
        dist.recv(tensor, src)


def add_along(tensor, pairs):
    """Let the first rank of each pair add what the second one sends."""
    arriving = torch.empty_like(tensor)
    for dst, src in pairs:
        if dist.get_rank() == src:
            dist.send(tensor, dst)
        elif dist.get_rank() == dst:
            dist.recv(arriving, src)
            tensor += arriving


def in_a_tree(distances):
    """Return pairs of ranks at these distances."""
    n = dist.get_world_size()
    return [(dst, dst + by) for by in distances for dst in range(0, n - by, 2 * by)]


@mistake(
    "2.2",
    "no partner",
    "tree_reduce(tensor) on 5 ranks: wrong result\n",
    "rank 0 should hold [150, 155, 160, 165, 170] but holds [100, 104,",
)
def test_a_tree_with_too_few_rounds_for_five(tensor):
    add_along(tensor, in_a_tree((1, 2)))


@mistake(
    "2.2",
    "upwards",
    "tree_reduce(tensor) on 2 ranks: wrong result\n",
    "but holds [10, 11, 12, 13, 14]\n",
)
def test_a_tree_that_grows_upward(tensor):
    add_along(tensor, [(1, 0)] if dist.get_world_size() > 1 else [])


@mistake(
    "2.2",
    "own numbers lost",
    "tree_reduce(tensor) on 2 ranks: wrong result\n",
    "but holds [20, 21, 22, 23, 24]\n",
)
def test_a_tree_that_does_not_add(tensor):
    if dist.get_rank() == 1:
        dist.send(tensor, 0)
    elif dist.get_rank() == 0 and dist.get_world_size() > 1:
        dist.recv(tensor, 1)


@mistake("2.2", "not once", "rank 0 should hold [30, 32, 34, 36, 38] but holds [50, 53, 56, 59, 62")
def test_a_tree_that_adds_twice(tensor):
    add_along(tensor, in_a_tree((1, 1, 2, 4)))


@mistake("2.2", "unchanged", "on 2 ranks: wrong result\n")
def test_a_tree_that_makes_another_tensor(tensor):
    add_along(tensor.clone(), in_a_tree((1, 2, 4)))


@mistake("2.2", "sent twice", "right, but 40 bytes were sent where 20 would be enough\n")
def test_a_tree_that_sends_the_sum_back(tensor):
    add_along(tensor, in_a_tree((1, 2, 4)))
    add_along(torch.zeros_like(tensor), [(dst, src) for src, dst in in_a_tree((1, 2, 4))])


@mistake(
    "2.2",
    "too many rounds",
    "on 4 ranks: right, but it takes 3 rounds where 2 would be enough\n",
)
def test_a_tree_that_is_a_star(tensor):
    add_along(tensor, [(0, src) for src in range(1, dist.get_world_size())])


@mistake(
    "2.2",
    "too many rounds",
    "on 4 ranks: right, but it takes 3 rounds where 2 would be enough\n",
)
def test_a_tree_that_is_a_line(tensor):
    add_along(tensor, [(src - 1, src) for src in reversed(range(1, dist.get_world_size()))])


@mistake(
    "2.3",
    "wrong piece",
    "all_gather(pieces, tensor) on 2 ranks: wrong result\n",
    "rank 1 should hold [[10, 11, 12], [20, 21, 22]] but holds [[20, 21, 22], [10",
)
def test_pieces_in_the_order_in_which_they_came(pieces, tensor):
    left, right = neighbours()
    pieces[0].copy_(tensor)
    for step in range(dist.get_world_size() - 1):
        exchange(pieces[step], right, pieces[step + 1], left)


@mistake(
    "2.3",
    "too many bytes",
    "on 2 ranks: right, but 48 bytes were sent where 24 would be enough\n",
)
def test_pieces_that_come_twice(pieces, tensor):
    (rank, n), (left, right) = (dist.get_rank(), dist.get_world_size()), neighbours()
    together = torch.zeros(n, len(tensor))
    together[rank] = tensor
    for _ in range(n - 1):  # every message is the whole list
        arriving = torch.empty_like(together)
        exchange(together, right, arriving, left)
        together = torch.maximum(together, arriving)
    for piece, row in zip(pieces, together, strict=True):
        piece.copy_(row)


def gather(returned_by_all=False, room=None, reverse=False, lengths=1):
    """Return an answer to 2.4 with one thing wrong."""

    def answer(tensor, dst):
        rank, n = dist.get_rank(), dist.get_world_size()
        pieces, length = [tensor] * n, torch.tensor([len(tensor)])
        for src in [src for src in range(n) if src != dst]:
            if rank == src:
                for _ in range(lengths):
                    dist.send(length, dst)
                dist.send(tensor, dst)
            elif rank == dst:
                for _ in range(lengths):
                    dist.recv(length, src)
                pieces[src] = torch.empty(room or length.item())
                dist.recv(pieces[src], src)
        return (pieces[::-1] if reverse else pieces) if returned_by_all or rank == dst else None

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "facts"),
    [
        (
            {"returned_by_all": True},
            "wrong list",
            ["gather(tensor, dst=0) on 2 ranks: wrong result\nrank 1 should return None"],
        ),
        (
            {"room": 5},
            "",
            [
                "gather(tensor, dst=0) on 2 ranks: the ranks' calls do not match\n",
                "rank 1 sends 0 bytes, rank 0 receives into a tensor of 20 bytes.\n",
            ],
        ),
        (
            {"reverse": True},
            "wrong list",
            ["rank 0 should return [[10, 11], []] but returns [[], [10, 11]]\n"],
        ),
        (
            {"lengths": 2},
            "too many messages",
            ["right, but 16 bytes were sent where 8 would be enough\n"],
        ),
    ],
)
def test_a_gather_that_is(wrong, name, facts):
    assert_mistake(kit.check.exercise_2_4, gather(**wrong), name, *facts)


@mistake(
    "2.5",
    "leaves early",
    "barrier() on 2 ranks: a rank may leave too early\n",
    "rank 1 leaves without having heard of rank 0\n",
)
def test_a_barrier_that_lets_the_reporting_ranks_go():
    add_along(torch.zeros(1), [(0, src) for src in range(1, dist.get_world_size())])


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


@pytest.mark.parametrize(
    ("turns", "name", "facts"),
    [
        (
            1,
            "leaves early",
            [
                "barrier() on 3 ranks: a rank may leave too early\n",
                "\nrank 1 leaves without having heard of rank 2\n",
            ],
        ),
        (
            3,
            "too many messages",
            ["on 2 ranks: right, but 6 messages were sent where 4 would be enough\n"],
        ),
    ],
)
def test_a_token_that_goes_round(turns, name, facts):
    assert_mistake(kit.check.exercise_2_5, token(turns), name, *facts)


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


def changed(number, name, changes):
    """Return the solution of an exercise with these changes."""
    program = solutions()[number]["program"]
    for right, wrong in changes.items():
        assert program.count(right) == 1, right
        program = program.replace(right, wrong)
    return defined(number, program, name)


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


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("right", "wrong", "name", "fact"),
    [
        ("return part.sort().values", "return part", "not sorted", "of rank 0 are not in order"),
        ("return part.sort()", "return part[1:].sort()", "numbers lost", "return 126 numbers"),
        ("return part.sort()", "return numbers.sort()", "overlap", "not one after the other"),
        (
            "dist.all_gather(gathered, samples)",
            "gathered = [samples] * world_size\n    for each in gathered[:1]:\n"
            "        dist.broadcast(each, 0)",
            "unbalanced",
            "right, but a rank has",
        ),
        (
            "in_order[places]",
            "in_order[-1] * torch.arange(1, world_size) / world_size",
            "unbalanced",
            "right, but a rank has 152 of 256 numbers, more than twice 64",
        ),
        (
            "    numbers = numbers.sort().values\n",
            "    all_of_them = [torch.empty_like(numbers) for _ in range(world_size)]\n"
            "    dist.all_gather(all_of_them, numbers)\n    numbers = numbers.sort().values\n",
            "all to all ranks",
            "bytes were sent by rank 0 where 512 would be enough",
        ),
    ],
)
def test_a_sort_that_is_wrong(right, wrong, name, fact):
    answer = changed("2.10", "sample_sort", {right: wrong})
    assert_mistake(kit.check.exercise_2_10, answer, name, fact)


def directly(pieces):
    rank, n = dist.get_rank(), dist.get_world_size()
    came = [torch.empty_like(piece) for piece in pieces]
    came[rank] = pieces[rank]
    works = [dist.isend(pieces[dst], dst) for dst in range(n) if dst != rank]
    works += [dist.irecv(came[src], src) for src in range(n) if src != rank]
    for work in works:
        work.wait()
    return came


def in_four_rounds(pieces):
    rank, n = dist.get_rank(), dist.get_world_size()
    came = {rank: pieces[rank]}
    over = torch.empty_like(pieces[0])
    for way in (3, 2, 1, 4):
        going = [pieces[(rank + way) % n]]
        going += [pieces[(rank + 5) % n]] if way == 3 else [over] if way == 2 else []
        arriving = torch.empty(len(going), len(over))
        sending = dist.isend(torch.stack(going), (rank + way) % n)
        dist.recv(arriving, (rank - way) % n)
        sending.wait()
        came[(rank - way) % n] = arriving[0]
        if way == 3:
            over = arriving[1]
        elif way == 2:
            came[(rank - 5) % n] = arriving[1]
    return [came[src] for src in range(n)]


@pytest.mark.parametrize(
    ("answer", "stars", "goals"), [(directly, "★☆☆ 55 µs", 1), (in_four_rounds, "★★☆ 46 µs", 2)]
)
def test_an_all_to_all_that_reaches_some_goals(answer, stars, goals, capsys):
    assert sum(kit.check.exercise_2_11(answer).parts.values()) == goals
    said = capsys.readouterr().out
    assert said == f"Exercise 2.11: {stars}; the best known answer has 37.\n"


def test_the_best_known_all_to_all_reaches_all_goals(capsys):
    assert kit.check.exercise_2_11(changed("2.11", "all_to_all_fast", {})) == 1
    assert capsys.readouterr().out.startswith("Exercise 2.11: ★★★ 37 µs")


@mistake("2.11", "no goal", "where at most 55 are the first goal")
def test_an_all_to_all_over_rank_0(pieces):
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.stack(pieces)
    if rank:
        dist.send(mine, 0)
        dist.recv(mine, 0)
        return [*mine]
    table = [mine, *(torch.empty_like(mine) for _ in range(1, n))]
    for src in range(1, n):
        dist.recv(table[src], src)
    for dst in range(1, n):
        dist.send(torch.stack([row[dst] for row in table]), dst)
    return [row[0] for row in table]


@mistake("2.11", "own pieces", "rank 1 should return [1, 11, 21, 31, 41, 51] but returns [10, 11")
def test_an_all_to_all_that_sends_nothing(pieces):
    return pieces


@mistake("2.11", "other order", "should return [0, 10, 20, 30, 40, 50] but returns [50, 40, 30")
def test_an_all_to_all_in_another_order(pieces):
    return changed("2.11", "all_to_all_fast", {})(pieces)[::-1]


@mistake("2.11", "other pieces", "wrong result")
def test_an_all_to_all_in_which_pieces_stop_too_early(pieces):
    wrong = {"while distance < world_size": "while distance < 3"}
    return changed("2.11", "all_to_all_fast", wrong)(pieces)


@mistake("2.11", "collective", "on 6 ranks: all_to_all was called")
def test_an_all_to_all_by_all_to_all(pieces):
    came = [torch.empty_like(piece) for piece in pieces]
    dist.all_to_all(came, pieces)
    return came
