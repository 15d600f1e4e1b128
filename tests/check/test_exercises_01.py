"""Wrong answers to the exercises of lesson 01, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text

import ddp_kit as kit


def counting(add):
    """Return an answer to 1.1; add: returns the counter to send on, given the one received."""

    def ping_pong(counter, rounds):
        rank = dist.get_rank()
        for turn in range(2 * rounds):
            if rank == turn % 2:
                dist.send(counter, dst=1 - turn % 2)
            elif rank == 1 - turn % 2:
                dist.recv(counter, src=turn % 2)
                counter = add(counter)

    return ping_pong


def test_a_counter_that_only_one_rank_adds_to():
    text = error_text(
        kit.check.exercise_1_1, counting(lambda counter: counter.add_(dist.get_rank()))
    )
    assert text.startswith("exercise 1.1, ping_pong(counter, rounds=1) on 2 ranks: wrong result\n")
    assert "rank 0 should hold [2] but holds [1]\n" in text
    assert text.endswith("All other ranks leave theirs alone.")


def test_a_counter_that_is_replaced_instead_of_changed():
    text = error_text(kit.check.exercise_1_1, counting(lambda counter: counter + 1))
    assert "nothing added. Change the tensor in place: `a += b`" in text


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
        kit.check.exercise_1_1(ping_pong)
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


def test_a_counter_that_is_sent_twice():
    def ping_pong(counter, rounds):
        rank = dist.get_rank()
        for turn in range(2 * rounds):
            for _ in range(2):
                if rank == turn % 2:
                    dist.send(counter, dst=1 - turn % 2)
                elif rank == 1 - turn % 2:
                    dist.recv(counter, src=turn % 2)
            if rank == 1 - turn % 2:
                counter += 1

    text = error_text(kit.check.exercise_1_1, ping_pong)
    assert "right, but 32 bytes were sent where 16 would be enough\nA round is one message" in text


def test_a_shift_the_other_way():
    def shift(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        arriving = torch.empty_like(tensor)
        sending = dist.isend(tensor, (rank - 1) % n)
        dist.recv(arriving, (rank + 1) % n)
        sending.wait()
        return arriving

    text = error_text(kit.check.exercise_1_2, shift)
    assert "shift(tensor) on 3 ranks: wrong result\n" in text  # on 2 both ways are one
    assert "rank 0 should return [30, 31, 32, 33] but returns [20, 21, 22, 23]\n" in text
    assert text.endswith("Send the tensor to `right`, and receive from `left`.")


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


def test_a_shift_that_writes_over_the_tensor():
    def shift(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        going = tensor.clone()
        sending = dist.isend(going, (rank + 1) % n)
        dist.recv(tensor, (rank - 1) % n)
        sending.wait()
        return tensor

    assert "Receive into `arriving`" in error_text(kit.check.exercise_1_2, shift)


def test_a_running_sum_that_forgets_what_came_before():
    def running_sum(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        arriving, own = torch.empty_like(tensor), tensor.clone()
        if rank > 0:
            dist.recv(arriving, rank - 1)
            tensor += arriving
        if rank < n - 1:
            dist.send(own, rank + 1)

    text = error_text(kit.check.exercise_1_3, running_sum)
    assert "running_sum(tensor) on 3 ranks: wrong result\n" in text
    assert "rank 2 should hold [60, 63, 66] but holds [50, 52, 54]\n" in text
    assert text.endswith("so it adds before it sends.")


def test_a_running_sum_that_is_another_tensor():
    def running_sum(tensor):
        rank, n = dist.get_rank(), dist.get_world_size()
        arriving = torch.empty_like(tensor)
        if rank > 0:
            dist.recv(arriving, rank - 1)
            tensor = tensor + arriving
        if rank < n - 1:
            dist.send(tensor, rank + 1)

    text = error_text(kit.check.exercise_1_3, running_sum)
    assert (
        "Every rank still holds what it started with. Change the tensor in place: `a += b`" in text
    )


def test_a_running_sum_where_everybody_sends_to_all():
    def running_sum(tensor):
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

    text = error_text(kit.check.exercise_1_3, running_sum)
    assert (
        "on 3 ranks: right, but 36 bytes were sent where 24 would be enough\nEach rank except"
        in text
    )


def test_a_running_sum_by_gathering():
    def running_sum(tensor):
        pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, tensor)
        tensor.copy_(sum(pieces[: dist.get_rank() + 1]))

    text = error_text(kit.check.exercise_1_3, running_sum)
    assert "on 2 ranks: all_gather was called\nBuild this one from send" in text


def test_a_stream_that_rank_0_does_not_return():
    assert "rank 0 should return [3, 1, 4] but returns None\n" in error_text(
        kit.check.exercise_1_4, stream([3, 1, 4], returned=False)
    )


def test_a_stream_without_its_last_item():
    text = error_text(kit.check.exercise_1_4, stream([3, 1], returned=True))
    assert "stream([3, 1, 4]) on 2 ranks: wrong result\n" in text
    assert "rank 1 should return [3, 1, 4] but returns [3, 1]\nSend every item to" in text


def stream(sent, returned):
    """Return an answer to 1.4 that sends other items than it was given."""

    def answer(items):
        n, received, number = dist.get_world_size(), [], torch.tensor([0])
        if dist.get_rank() == 0:
            for item in [*sent, -1]:
                for dst in range(1, n):
                    dist.send(torch.tensor([item]), dst)
            return items if returned else None
        dist.recv(number, 0)
        while number.item() != -1:
            received.append(number.item())
            dist.recv(number, 0)
        return received

    return answer
