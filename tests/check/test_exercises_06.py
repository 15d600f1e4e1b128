"""Wrong answers to the exercises of lesson 06, and the errors that the learner gets."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from datetime import timedelta

import pytest
from answers import assert_mistake, mistake, solved

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_a_place_may_be_a_list(capsys):
    changes = {"return before + local_rank, sum(sizes)": "return [before + local_rank, sum(sizes)]"}
    kit.check.exercise_6_1(solved("6.1", changes))
    assert capsys.readouterr().out == (
        "Exercise 6.1: right for 4 and 5 ranks on two and three hosts.\n"
    )


def test_a_store_may_be_asked_in_other_ways(capsys):
    asked = "[value.decode() for value in store.multi_get(keys)]"
    kit.check.exercise_6_b(solved("6.b", {"[store.get(key).decode() for key in keys]": asked}))

    def join(store, run, world_size):
        mine = str(uuid.uuid4())
        for rank in range(world_size):
            if store.compare_set(f"{run}/{rank}", "", mine) == mine.encode():
                return rank
        raise RuntimeError("all places are taken")

    kit.check.exercise_6_a(join)


def test_a_barrier_whose_key_nobody_writes():
    answer = solved("6.2", {"== world_size": "== world_size + 1"})
    fact = "exercise 6.2, barrier(store, 2, name): it raised an error\n"
    assert_mistake(kit.check.exercise_6_2, answer, "key never written", fact)


def by_counter(store, world_size, name):
    store.add(name, 1)
    while store.add(name, 0) < world_size:
        time.sleep(0.01)


def by_value(store, world_size, name):
    store.add(name, 1)
    while int(store.get(name)) < world_size:
        time.sleep(0.01)


def by_key(store, world_size, name):
    if store.add(name, 1) == world_size:
        store.set(f"{name} complete", "")
    while not store.check([f"{name} complete"]):
        time.sleep(0.01)


@pytest.mark.parametrize("barrier", [by_counter, by_value, by_key])
def test_a_barrier_may_look_until_it_is_complete(barrier, capsys):
    kit.check.exercise_6_2(barrier)
    assert capsys.readouterr().out.startswith("Exercise 6.2: right on 1, 2, 3, 4 and 5 ranks")


@mistake("6.3", "waits for each", "where 2 ranks never came: wrong result\n")
def test_a_roll_call_that_waits_for_each_rank(store, world_size, seconds):
    for rank in range(world_size):
        with suppress(RuntimeError):
            store.wait([f"here/{rank}"], timedelta(seconds=seconds))
    return [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]


@pytest.mark.parametrize("now", [lambda: time.monotonic_ns() / 1e9, lambda: time.time()])
def test_a_roll_call_may_look_again_and_again(now, capsys):
    def who_is_missing(store, world_size, seconds):
        end = now() + seconds
        while missing := [r for r in range(world_size) if not store.check([f"here/{r}"])]:
            if now() > end:
                break
            time.sleep(0.1)
        return missing

    kit.check.exercise_6_3(who_is_missing)
    assert capsys.readouterr().out.startswith("Exercise 6.3: right on 1, 2, 3, 4 and 5 ranks")


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
