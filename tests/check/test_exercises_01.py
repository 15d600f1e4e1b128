"""Wrong answers to the exercises of lesson 01, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, error_text, mistake

import ddp_kit as kit
from ddp_kit.lessons.ring_allreduce import exchange, neighbours


@pytest.mark.parametrize(
    ("add", "name", "fact"),
    [
        (
            lambda counter: counter.add_(dist.get_rank()),
            "wrong count",
            "exercise 1.1, ping_pong(counter, rounds=1) on 2 ranks: wrong result\n"
            "rank 0 should hold [2] but holds [1]\n",
        ),
        (lambda counter: counter + 1, "nothing added", "rank 0 should hold [2] but holds [1]"),
    ],
)
def test_a_counter_of_which_the_received_value_becomes(add, name, fact):
    def ping_pong(counter, rounds):
        rank = dist.get_rank()
        for turn in range(2 * rounds):
            if rank == turn % 2:
                dist.send(counter, dst=1 - turn % 2)
            elif rank == 1 - turn % 2:
                dist.recv(counter, src=turn % 2)
                counter = add(counter)

    assert_mistake(kit.check.exercise_1_1, ping_pong, name, fact)


def test_an_onlooker_who_waits_is_reported_and_drawn_as_a_deadlock(monkeypatch):
    def ping_pong(counter, rounds):
        rank = dist.get_rank()
        for turn in range(2 * rounds):
            if rank == turn % 2:
                dist.send(counter, dst=1 - turn % 2)
            else:
                dist.recv(counter, src=turn % 2)
                counter += 1

    with pytest.raises(kit.ExerciseError) as caught:
        kit.check.exercise_1_1(ping_pong, hint=1)
    error = caught.value
    assert str(error) == (
        "exercise 1.1, ping_pong(counter, rounds=1) on 3 ranks: it deadlocks\n" + str(error.error)
    )
    assert isinstance(error.error, kit.DeadlockError)
    assert error.__cause__ is error.error
    assert "rank 2 was waiting for rank 0 in recv(src=0)" in str(error)
    assert " of ping_pong: dist.recv(counter, src=turn % 2)" in str(error)
    drawn = []
    monkeypatch.setattr(error.error, "draw_waits", drawn.append)
    shown = error._render_traceback_()  # what IPython shows
    assert drawn == [error.error]
    assert shown[1].startswith("DeadlockError: rank 2 waits for a message from rank 0")
    assert kit.plot.waits(error.error).text_table
    assert list(kit.run(lambda rank, world_size: rank, world_size=3)) == [0, 1, 2]


@mistake("1.1", "too many messages", "right, but 32 bytes were sent where 16 would be enough\n")
def test_a_counter_that_is_sent_twice(counter, rounds):
    rank = dist.get_rank()
    for turn in range(2 * rounds):
        for _ in range(2):
            if rank == turn % 2:
                dist.send(counter, dst=1 - turn % 2)
            elif rank == 1 - turn % 2:
                dist.recv(counter, src=turn % 2)
        if rank == 1 - turn % 2:
            counter += 1


@mistake(
    "1.2",
    "other way round",
    "shift(tensor) on 3 ranks: wrong result\n",  # on 2 both ways are one
    "rank 0 should return [30, 31, 32, 33] but returns [20, 21, 22, 23]\n",
)
def test_a_shift_the_other_way(tensor):
    left, right = neighbours()
    arriving = torch.empty_like(tensor)
    exchange(tensor, left, arriving, right)
    return arriving


def as_a_batch(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(tensor)
    sending = dist.P2POp(dist.isend, tensor, (rank + 1) % n)
    receiving = dist.P2POp(dist.irecv, arriving, (rank - 1) % n)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return arriving


def in_turns(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(tensor)
    if rank % 2 == 0:
        dist.send(tensor, (rank + 1) % n)
    dist.recv(arriving, (rank - 1) % n)
    if rank % 2 == 1:
        dist.send(tensor, (rank + 1) % n)
    return arriving


@pytest.mark.parametrize("shift", [as_a_batch, in_turns])
def test_other_right_shifts_pass_as_the_solution_says(shift, capsys):
    kit.check.exercise_1_2(shift)
    assert capsys.readouterr().out.startswith("Exercise 1.2: right ")


def test_a_shift_that_does_not_wait_for_its_send(capsys):
    def shift(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        arriving, thanks = torch.empty_like(tensor), torch.empty(1)
        work = dist.isend(tensor, (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        for src in range(n):  # without it, the message may or may not be lost
            if rank == src:
                dist.send(thanks, (src - 1) % n)
            elif rank == (src - 1) % n:
                dist.recv(thanks, src)
        del work
        print("shifted")
        return arriving

    text = error_text(kit.check.exercise_1_2, shift)
    words = "which may still be in flight; keep what it returns and call wait()\n"
    line = shift.__code__.co_firstlineno + 3
    assert text == (
        "exercise 1.2, shift(tensor) on 2 ranks: "
        "some operations were started but never waited for\n"
        f"rank 0 never waited for isend(dst=1), {words}"
        f"rank 1 never waited for isend(dst=0), {words}"
        f"    line {line} of shift in test_exercises_01.py: "
        "work = dist.isend(tensor, (rank + 1) % n)"
    )
    assert capsys.readouterr().out == "[rank 0] shifted\n[rank 1] shifted\n"  # reported once


@mistake("1.2", "overwritten", "rank 0 should hold [10, 11, 12, 13] but holds [20, 21, 22, 23]")
def test_a_shift_that_writes_over_the_tensor(tensor):
    left, right = neighbours()
    exchange(tensor.clone(), right, tensor, left)
    return tensor


@mistake("1.2", "too many messages", "right, but 64 bytes were sent where 32 would be enough\n")
def test_a_shift_that_sends_twice(tensor):
    left, right = neighbours()
    arriving = torch.empty_like(tensor)
    for _ in range(2):
        exchange(tensor, right, arriving, left)
    return arriving


@mistake(
    "1.3",
    "not a running sum",
    "running_sum(tensor) on 3 ranks: wrong result\n",
    "rank 2 should hold [60, 63, 66] but holds [50, 52, 54]\n",
)
def test_a_running_sum_that_leaves_out_what_came_before(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving, own = torch.empty_like(tensor), tensor.clone()
    if rank > 0:
        dist.recv(arriving, rank - 1)
        tensor += arriving
    if rank < n - 1:
        dist.send(own, rank + 1)


@mistake("1.3", "not received", "rank 0 should hold [10, 11, 12] but holds [nan, nan, nan]\n")
def test_a_running_sum_to_which_rank_0_adds_what_it_has_not_received(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(tensor)
    if rank > 0:
        dist.recv(arriving, rank - 1)
    tensor += arriving
    if rank < n - 1:
        dist.send(tensor, rank + 1)


@mistake("1.3", "unchanged", "rank 1 should hold [30, 32, 34] but holds [20, 21, 22]\n")
def test_a_running_sum_that_is_another_tensor(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(tensor)
    if rank > 0:
        dist.recv(arriving, rank - 1)
        tensor = tensor + arriving
    if rank < n - 1:
        dist.send(tensor, rank + 1)


@mistake(
    "1.3",
    "too many messages",
    "on 3 ranks: right, but 36 bytes were sent where 24 would be enough\n",
)
def test_a_running_sum_where_everybody_sends_to_all(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    own = tensor.clone()
    for src in range(n):
        for dst in range(src + 1, n):
            if rank == src:
                dist.send(own, dst)
            elif rank == dst:
                arriving = torch.empty_like(own)
                dist.recv(arriving, src)
                tensor += arriving


@mistake("1.3", "collective", "on 2 ranks: all_gather was called\n")
def test_a_running_sum_by_gathering(tensor):
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    tensor.copy_(sum(pieces[: dist.get_rank() + 1]))


def stream(sent=(3, 1, 4), returned=True, times=1):
    """Return an answer to 1.4 that sends other items than it was given."""

    def answer(items):
        n, received, number = dist.get_world_size(), [], torch.tensor([0])
        if dist.get_rank() == 0:
            for item in [*sent, -1]:
                for dst in [*range(1, n)] * times:
                    dist.send(torch.tensor([item]), dst)
            return items if returned else None
        while number.item() != -1:
            for _ in range(times):
                dist.recv(number, 0)
            received.append(number.item())
        return received[:-1]

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        (
            {"returned": False},
            "wrong items",
            "rank 0 should return [3, 1, 4] but returns None\n",
        ),
        (
            {"sent": (3, 1)},
            "wrong items",
            "stream([3, 1, 4]) on 2 ranks: wrong result\n"
            "rank 1 should return [3, 1, 4] but returns [3, 1]\n",
        ),
        (
            {"times": 2},
            "too many messages",
            "on 2 ranks: right, but 64 bytes were sent where 32 would be enough\n",
        ),
    ],
)
def test_a_stream_that_is(wrong, name, fact):
    assert_mistake(kit.check.exercise_1_4, stream(**wrong), name, fact)
