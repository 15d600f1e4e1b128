"""Wrong answers to the exercises of lesson 06, and the errors that the learner gets."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import pytest
from answers import assert_mistake, mistake, solved

import ddp_kit as kit
from ddp_kit.check import init_methods
from ddp_kit.check.grader import SIZES, Grader

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_a_place_may_be_a_list(capsys):
    changes = {"return before + local_rank, sum(sizes)": "return [before + local_rank, sum(sizes)]"}
    kit.check.exercise_6_1(solved("6.1", changes))
    assert capsys.readouterr().out == (
        "Exercise 6.1: right for 4 and 5 ranks on two and three hosts.\n"
    )


def test_a_barrier_whose_key_nobody_writes(monkeypatch):
    monkeypatch.setattr(init_methods, "STORE_LIMIT", timedelta(seconds=3))
    answer = solved("6.2", {"== world_size": "== world_size + 1"})
    fact = "exercise 6.2, barrier(store, world_size, name) on 2 ranks: it raised an error\n"
    assert_mistake(kit.check.exercise_6_2, answer, "key never written", fact)


def test_a_barrier_may_look_at_the_counter_until_it_is_complete(capsys):
    def barrier(store, world_size, name):
        store.add(name, 1)
        while store.add(name, 0) < world_size:
            time.sleep(0.01)

    kit.check.exercise_6_2(barrier)
    assert capsys.readouterr().out.startswith("Exercise 6.2: right on 1, 2, 3, 4 and 5 ranks")


def test_a_roll_call_that_waits_for_each_rank(monkeypatch):
    monkeypatch.setattr(init_methods, "ABSENT", dict.fromkeys(SIZES, ([],)) | {4: ([1, 3],)})

    def who_is_missing(store, world_size, seconds):
        for rank in range(world_size):
            with suppress(RuntimeError):
                store.wait([f"here/{rank}"], timedelta(seconds=seconds))
        return [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]

    fact = "where 2 ranks never came on 4 ranks: right, but it took "
    assert_mistake(kit.check.exercise_6_3, who_is_missing, "waits for each", fact)


def test_a_roll_call_is_right_in_cases_that_differ_though_a_rank_starts_late(capsys, monkeypatch):
    cases, run = [], Grader.run

    def noting_run(grader, worker, *args, world_size, case):
        def begins_late(rank, world_size, *args):
            if rank == 1:
                time.sleep(3.5)  # rank 0 waits for 3 s
            return worker(rank, world_size, *args)

        *_, absent, _ = args
        cases.append((world_size, *absent))
        begins = begins_late if cases[-1] == (3, 2) else worker
        return run(grader, begins, *args, world_size=world_size, case=case)

    monkeypatch.setattr(Grader, "run", noting_run)
    kit.check.exercise_6_3(solved("6.3"))
    assert capsys.readouterr().out.startswith("Exercise 6.3: right on 1, 2, 3, 4 and 5 ranks")
    small = [(1,), (2,), (2, 1), (3,), (3, 2)]
    assert sorted(cases) == [*small, (4,), (4, 1, 3), (5,), (5, 4)]


def meet_by_size(store, most, last_call, closed=10**6):
    """Answer 6.4 by looking at the size of the generation."""
    generation = 0
    while True:
        number = store.add(f"{generation} number", 1)
        if number == 1:
            last_call(generation)
            come = store.add(f"{generation} number", closed) % closed
            store.set(f"{generation} size", str(come if come < most else most))
        if number < closed:
            size = int(store.get(f"{generation} size"))
            if number <= size:
                return generation, number - 1, size
        generation += 1


def test_a_rendezvous_that_looks_at_the_size_is_right():
    kit.check.exercise_6_4(meet_by_size)


@mistake("6.4", "fails", "it raised an error")
def test_a_rendezvous_without_a_size(store, most, last_call):
    store.add("0/come", 1)
    raise KeyError("size")
