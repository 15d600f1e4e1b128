"""Wrong answers to the exercises of lesson 02, and the errors that the learner gets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import error_text

import ddp_kit as kit


def test_a_broadcast_that_always_comes_from_rank_0():
    def broadcast(tensor, src):
        if dist.get_rank() == 0:
            for dst in range(1, dist.get_world_size()):
                dist.send(tensor, dst)
        else:
            dist.recv(tensor, 0)

    text = error_text(kit.check.exercise_2_1, broadcast)
    assert text.startswith("exercise 2.1, broadcast(tensor, src=1) on 2 ranks: wrong result\n")
    assert "rank 0 should hold [20, 21, 22, 23, 24] but holds [10, 11, 12, 13, 14]\n" in text
    assert "Rank `src` sends, and that need not be rank 0." in text


def test_a_broadcast_that_all_receive_from_rank_0():
    def broadcast(tensor, src):
        rank, n = dist.get_rank(), dist.get_world_size()
        if rank == src:
            for dst in set(range(n)) - {src}:
                dist.send(tensor, dst)
        else:
            dist.recv(tensor, 0)

    text = error_text(kit.check.exercise_2_1, broadcast)
    assert (
        "broadcast(tensor, src=1) on 2 ranks: it raised an error\nrank 0 raised ValueError: "
        in text
    )
    assert "ValueError: a rank cannot receive from itself: src is its own rank\n" in text


def test_a_broadcast_that_receives_into_another_tensor():
    def broadcast(tensor, src):
        for dst in set(range(dist.get_world_size())) - {src}:
            if dist.get_rank() == src:
                dist.send(tensor, dst)
            elif dist.get_rank() == dst:
                tensor = torch.empty_like(tensor)
                dist.recv(tensor, src)

    text = error_text(kit.check.exercise_2_1, broadcast)
    assert "src=0) on 2 ranks: wrong result\nrank 1 should hold [10, 11, 12, 13, 14]" in text
    assert "\nEvery rank still holds what it started with. Change the tensor in place" in text


def test_a_broadcast_that_calls_broadcast():
    def broadcast(tensor, src):
        dist.broadcast(tensor, src)

    text = error_text(kit.check.exercise_2_1, broadcast)
    assert "on 2 ranks: broadcast was called\nBuild this one from send and recv" in text


def test_a_broadcast_that_fails_on_one_rank():
    def broadcast(tensor, src):
        rank, n = dist.get_rank(), dist.get_world_size()
        if rank == src:
            for step in range(max(1, n - 1)):
                dist.send(tensor, (src + 1 + step) % n)
        else:
            dist.recv(tensor, src)

    text = error_text(kit.check.exercise_2_1, broadcast)
    assert (
        "broadcast(tensor, src=0) on 1 rank: it raised an error\nrank 0 raised ValueError:" in text
    )
    assert " of broadcast: dist.send(tensor, (src + 1 + step) % n)" in text


def test_a_tree_with_too_few_rounds_for_five():
    def tree_reduce(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        arriving = torch.empty_like(tensor)
        for distance in (1, 2):
            if rank % (2 * distance) == distance:
                dist.send(tensor, rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < n:
                dist.recv(arriving, rank + distance)
                tensor += arriving

    text = error_text(kit.check.exercise_2_2, tree_reduce)
    assert "tree_reduce(tensor) on 5 ranks: wrong result\n" in text
    assert "rank 0 should hold [150, 155, 160, 165, 170] but holds [100, 104," in text
    assert text.endswith("3 and 5 are not powers of two.")


def test_a_tree_that_grows_upward_or_does_not_add():
    def upward(tensor):
        rank, arriving = dist.get_rank(), torch.empty_like(tensor)
        if rank == 1:
            dist.recv(arriving, 0)
            tensor += arriving
        elif rank == 0 and dist.get_world_size() > 1:
            dist.send(tensor, 1)

    def replacing(tensor):
        if dist.get_rank() == 1:
            dist.send(tensor, 0)
        elif dist.get_rank() == 0 and dist.get_world_size() > 1:
            dist.recv(tensor, 1)

    for answer, hint in (
        (upward, "but holds [10, 11, 12, 13, 14]\nNothing reached rank 0."),
        (replacing, "but holds [20, 21, 22, 23, 24]\nRank 0 lost its own numbers."),
    ):
        text = error_text(kit.check.exercise_2_2, answer)
        assert "tree_reduce(tensor) on 2 ranks: wrong result\n" in text
        assert hint in text


def test_a_tree_that_makes_another_tensor():
    def tree_reduce(tensor):
        rank, n, distance = dist.get_rank(), dist.get_world_size(), 1
        arriving = torch.empty_like(tensor)
        while distance < n:
            if rank % (2 * distance) == distance:
                dist.send(tensor, rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < n:
                dist.recv(arriving, rank + distance)
                tensor = tensor + arriving
            distance *= 2

    text = error_text(kit.check.exercise_2_2, tree_reduce)
    assert (
        "Every rank still holds what it started with. Change the tensor in place: `a += b`" in text
    )


def test_a_tree_that_is_a_star_or_a_line():
    def star(tensor):
        rank, arriving = dist.get_rank(), torch.empty_like(tensor)
        if rank > 0:
            dist.send(tensor, 0)
        else:
            for src in range(1, dist.get_world_size()):
                dist.recv(arriving, src)
                tensor += arriving

    def line(tensor):
        rank, arriving = dist.get_rank(), torch.empty_like(tensor)
        if rank < dist.get_world_size() - 1:
            dist.recv(arriving, rank + 1)
            tensor += arriving
        if rank > 0:
            dist.send(tensor, rank - 1)

    for answer in (star, line):
        text = error_text(kit.check.exercise_2_2, answer)
        assert (
            "on 4 ranks: right, but it takes 3 rounds where 2 would be enough\nIn each round"
            in text
        )


def test_pieces_in_the_order_in_which_they_came():
    def all_gather(pieces, tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        pieces[0].copy_(tensor)
        for step in range(n - 1):
            sending = dist.isend(pieces[step], (rank + 1) % n)
            dist.recv(pieces[step + 1], (rank - 1) % n)
            sending.wait()

    text = error_text(kit.check.exercise_2_3, all_gather)
    assert "all_gather(pieces, tensor) on 2 ranks: wrong result\n" in text
    assert "rank 1 should hold [[10, 11, 12], [20, 21, 22]] but holds [[20, 21, 22], [10" in text
    assert "`pieces[r]` must hold rank r's tensor" in text


def test_pieces_that_come_twice():
    def all_gather(pieces, tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        together = torch.zeros(n, len(tensor))
        together[rank] = tensor
        for _ in range(n - 1):  # every message is the whole list
            arriving = torch.empty_like(together)
            sending = dist.isend(together, (rank + 1) % n)
            dist.recv(arriving, (rank - 1) % n)
            sending.wait()
            together = torch.maximum(together, arriving)
        for piece, row in zip(pieces, together, strict=True):
            piece.copy_(row)

    text = error_text(kit.check.exercise_2_3, all_gather)
    assert "on 2 ranks: right, but 48 bytes were sent where 24 would be enough\n" in text
    assert text.endswith("needs the piece of every other rank once.")


def test_a_gather_that_every_rank_returns():
    text = error_text(kit.check.exercise_2_4, gather(returned_by_all=True))
    assert "gather(tensor, dst=0) on 2 ranks: wrong result\nrank 1 should return None" in text


def test_a_gather_of_equal_sizes():
    text = error_text(kit.check.exercise_2_4, gather(room=5))
    assert "gather(tensor, dst=0) on 2 ranks: the ranks' calls do not match\n" in text
    assert "rank 1 sends 0 bytes, rank 0 receives into a tensor of 20 bytes.\n" in text


def test_a_gather_in_reverse():
    text = error_text(kit.check.exercise_2_4, gather(reverse=True))
    assert "rank 0 should return [[10, 11], []] but returns [[], [10, 11]]\n" in text
    assert "in rank order" in text


def gather(returned_by_all=False, room=None, reverse=False):
    """Return an answer to 2.4 with one thing wrong."""

    def answer(tensor, dst):
        rank, n = dist.get_rank(), dist.get_world_size()
        pieces, length = [tensor] * n, torch.tensor([len(tensor)])
        for src in [src for src in range(n) if src != dst]:
            if rank == src:
                dist.send(length, dst)
                dist.send(tensor, dst)
            elif rank == dst:
                dist.recv(length, src)
                pieces[src] = torch.empty(room or length.item())
                dist.recv(pieces[src], src)
        return (pieces[::-1] if reverse else pieces) if returned_by_all or rank == dst else None

    return answer


def test_a_barrier_that_lets_the_reporting_ranks_go():
    def barrier():
        rank, n, token = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
        if rank > 0:
            dist.send(token, 0)
        else:
            for src in range(1, n):
                dist.recv(token, src)

    text = error_text(kit.check.exercise_2_5, barrier)
    assert "barrier() on 2 ranks: a rank may leave too early\n" in text
    assert "rank 1 leaves without having heard of rank 0\nA rank learns" in text


def test_a_barrier_that_goes_round_only_once():
    text = error_text(kit.check.exercise_2_5, token(turns=1))
    assert "barrier() on 3 ranks: a rank may leave too early\n" in text
    assert "\nrank 1 leaves without having heard of rank 2\nA rank learns" in text


def test_a_barrier_by_exchange_or_by_a_token_that_goes_round_twice_is_right(capsys):
    def exchange():
        rank, n, distance = dist.get_rank(), dist.get_world_size(), 1
        while distance < n:
            sending = dist.isend(torch.zeros(1), (rank + distance) % n)
            dist.recv(torch.zeros(1), (rank - distance) % n)
            sending.wait()
            distance *= 2

    for barrier in (exchange, token(turns=2)):
        kit.check.exercise_2_5(barrier)
        assert capsys.readouterr().out == (
            "Exercise 2.5: right on 1, 2, 3, 4 and 5 ranks, nobody leaves before all have come.\n"
        )


def test_a_barrier_that_goes_round_three_times():
    text = error_text(kit.check.exercise_2_5, token(turns=3))
    assert "on 2 ranks: right, but 6 messages were sent where 4 would be enough\nA token" in text


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
