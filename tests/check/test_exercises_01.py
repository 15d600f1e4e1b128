"""Wrong answers to the exercises of lesson 01, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text, solved

import ddp_kit as kit


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
    assert str(error).startswith(
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


def test_an_order_by_the_number_of_rings_passes_as_well(capsys):
    first = "rank >= torch.tensor(distance).gcd(torch.tensor(world_size))"
    changes = {"if dst > rank": f"if {first}", "if dst < rank": f"if not {first}"}
    kit.check.exercise_1_2(solved("1.2", changes))
    assert capsys.readouterr().out.startswith("Exercise 1.2: right ")


def test_a_shift_that_does_not_wait_for_its_send(capsys):
    def shift(tensor, distance):
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
        "exercise 1.2, shift(tensor, distance=1) on 2 ranks: "
        "some operations were started but never waited for\n"
        f"rank 0 never waited for isend(dst=1), {words}"
        f"rank 1 never waited for isend(dst=0), {words}"
        f"    line {line} of shift in test_exercises_01.py: "
        "work = dist.isend(tensor, (rank + 1) % n)"
    )
    assert capsys.readouterr().out == "[rank 0] shifted\n[rank 1] shifted\n"  # reported once


def test_work_that_is_handed_out_unasked_passes(capsys):
    def distribute(tasks, work):
        rank, n = dist.get_rank(), dist.get_world_size()
        if n == 1:
            return list(map(work, tasks))
        if rank > 0:
            message = torch.tensor([0, 0])  # whether it is a task, and the task
            dist.recv(message, 0)
            while message[0] == 1:
                dist.send(torch.tensor([work(message[1].item())]), 0)
                dist.recv(message, 0)
            return None
        results, given, free = [None] * len(tasks), {}, list(range(1, n))
        waiting = list(range(len(tasks)))
        while waiting or given:
            while waiting and free:
                dst, place = free.pop(), waiting.pop()
                dist.send(torch.tensor([1, tasks[place]]), dst)
                given[dst] = place
            result = torch.tensor([0])
            src = dist.recv(result)
            results[given.pop(src)] = result.item()
            free.append(src)
        for dst in range(1, n):
            dist.send(torch.tensor([0, 0]), dst)
        return results

    kit.check.exercise_1_6(distribute)
    assert capsys.readouterr().out == (
        "Exercise 1.6: right on 1, 2, 3 and 4 ranks, each task done once, by whoever is free.\n"
    )
