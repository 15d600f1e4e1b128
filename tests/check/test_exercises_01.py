"""Wrong answers to the exercises of lesson 01, and the errors that the learner gets."""

from __future__ import annotations

from math import gcd

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, error_text, mistake

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions


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


def ends(distance):
    """Return the ranks to which this one sends, and from which it receives."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return (rank + distance) % n, (rank - distance) % n


def ordered(tensor, dst, src, sends_first):
    """Send and receive in an order, and return what came."""
    arriving = torch.empty_like(tensor)
    if sends_first:
        dist.send(tensor, dst)
    dist.recv(arriving, src)
    if not sends_first:
        dist.send(tensor, dst)
    return arriving


def test_an_order_by_the_number_of_rings_passes_as_well(capsys):
    def shift(tensor, distance):
        in_ring = dist.get_rank() >= gcd(distance, dist.get_world_size())
        return ordered(tensor, *ends(distance), sends_first=in_ring)

    kit.check.exercise_1_2(shift)
    assert capsys.readouterr().out.startswith("Exercise 1.2: right ")


@mistake(
    "1.2",
    "one ring hangs",
    "shift(tensor, distance=2) on 4 ranks: it deadlocks\n",
)
def test_a_shift_in_which_even_ranks_send_first(tensor, distance):
    return ordered(tensor, *ends(distance), sends_first=dist.get_rank() % 2 == 0)


@mistake("1.2", "not blocking", "distance=1) on 2 ranks: right, but ")
def test_a_shift_as_a_batch(tensor, distance):
    dst, src = ends(distance)
    arriving = torch.empty_like(tensor)
    sending = dist.P2POp(dist.isend, tensor, dst)
    receiving = dist.P2POp(dist.irecv, arriving, src)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return arriving


@mistake(
    "1.2",
    "other way round",
    "shift(tensor, distance=1) on 3 ranks: wrong result\n",  # on 2 both ways are one
    "rank 0 should return [30, 31, 32, 33] but returns [20, 21, 22, 23]\n",
)
def test_a_shift_the_other_way(tensor, distance):
    src, dst = ends(distance)
    return ordered(tensor, dst, src, sends_first=dst > dist.get_rank())


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


@mistake("1.2", "overwritten", "rank 0 should hold [10, 11, 12, 13] but holds [20, 21, 22, 23]")
def test_a_shift_that_writes_over_the_tensor(tensor, distance):
    dst, src = ends(distance)
    return tensor.copy_(ordered(tensor, dst, src, sends_first=dst > dist.get_rank()))


@mistake("1.2", "too many messages", "right, but 64 bytes were sent where 32 would be enough\n")
def test_a_shift_that_sends_twice(tensor, distance):
    dst, src = ends(distance)
    for _ in range(2):
        arriving = ordered(tensor, dst, src, sends_first=dst > dist.get_rank())
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


RETURNED = "return [results[place] for place in range(len(tasks))]"


@pytest.mark.parametrize(
    ("changes", "name", "fact"),
    [
        (
            {"dist.recv(message)": "dist.recv(message, 1 + len(results) % (world_size - 1))"},
            "waits for the slowest",
            "tag=7",
        ),
        (
            {RETURNED: "return sorted(results[place] for place in range(len(tasks)))"},
            "as they arrived",
            "returns [-13, -7, -3]",
        ),
        ({RETURNED: "return None"}, "other results", "[-7, -3, -13] but returns None"),
        (
            {"list(enumerate(tasks))": "[*enumerate(tasks), (0, tasks[0])]"},
            "not once",
            "those that were done are [3, 5, 5, 8]",
        ),
        (
            {"{}, list(enumerate(tasks))": "{0: work(tasks[0])}, list(enumerate(tasks))[1:]"},
            "rank 0 works",
            "rank 0 has done tasks itself",
        ),
        (
            {
                "    dist.send(torch.tensor(w": "    if waiting or src > 1:\n"
                + 12 * " "
                + "dist.send(torch.tensor(w"
            },
            "no end",
            "rank 1 was waiting for rank 0",
        ),
        (
            {"message[0] == -1": "message[1] == -1", "(-1, 0)": "(-1, -1)"},
            "taken for the end",
            "distribute([4, -1, 0, 1, -7], work) on 3 ranks: it deadlocks",
        ),
        (
            {
                "dist.send(message, 0)": "dist.send(message, 0), dist.send(message, 0)",
                "src = dist.recv(message)": "dist.recv(message, src := dist.recv(message))",
            },
            "too many messages",
            "right, but 12 messages were sent where 8 would be enough",
        ),
    ],
)
def test_work_that_is_handed_out_wrongly(changes, name, fact):
    program = solutions()["1.6"]["program"]
    for right, wrong in changes.items():
        assert program.count(right) == 1
        program = program.replace(right, wrong)
    assert_mistake(kit.check.exercise_1_6, defined("1.6", program, "distribute"), name, fact)
