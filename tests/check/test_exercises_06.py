"""Wrong answers to the exercises of lesson 06, and the errors that the learner gets."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import pytest
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check import init_methods
from ddp_kit.check.grader import SIZES, Grader

pytestmark = pytest.mark.usefixtures("forked_ranks")


def placed(rank=None, world_size=None, join=tuple):
    """Return an answer to 6.1; each argument can make it wrong in one way."""

    def place_of(hosts, host, local_rank):
        names, sizes = [name for name, _ in hosts], [ranks for _, ranks in hosts]
        before = names.index(host)
        found = rank(before, sizes, local_rank) if rank else sum(sizes[:before]) + local_rank
        return join([found, world_size(hosts) if world_size else sum(sizes)])

    return place_of


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"world_size": len}, "wrong world size"),
        ({"rank": lambda before, sizes, local: local}, "local rank"),
        (
            {"rank": lambda before, sizes, local: before * sizes[before] + local},
            "equal hosts",
        ),
        (
            {"rank": lambda before, sizes, local: sum(sizes[before + 1 :]) + local},
            "otherwise",
        ),
        ({"join": sum}, "another form"),
    ],
)
def test_a_place_that_is(wrong, name):
    facts = "exercise 6.1, place_of([(", " should return ("
    assert_mistake(kit.check.exercise_6_1, placed(**wrong), name, *facts)


@pytest.mark.parametrize("join", [tuple, list])
def test_places_are_right(join, capsys):
    kit.check.exercise_6_1(placed(join=join))
    assert capsys.readouterr().out == (
        "Exercise 6.1: right for 4 and 5 ranks on two and three hosts.\n"
    )


def barring(waits=True, own_keys=True, last=0):
    """Return an answer to 6.2; each argument can make it wrong in one way."""

    def barrier(store, world_size, name):
        prefix = name if own_keys else ""
        if store.add(f"{prefix} count", 1) == world_size + last:
            store.set(f"{prefix} all", "here")
        if waits:
            store.wait([f"{prefix} all"])

    return barrier


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        (
            {"waits": False},
            "nobody waits",
            "rank 0 left the first barrier before rank 1 had come\n",
        ),
        (
            {"own_keys": False},
            "same keys",
            "rank 1 left the second barrier before rank 0 had come\n",
        ),
        ({"last": 1}, "key never written", "it raised an error\n"),
    ],
)
def test_a_barrier_that_is(wrong, name, fact, monkeypatch):
    monkeypatch.setattr(init_methods, "STORE_LIMIT", timedelta(seconds=3))
    case = "exercise 6.2, barrier(store, world_size, name) on 2 ranks: "
    assert_mistake(kit.check.exercise_6_2, barring(**wrong), name, case + fact)


def counting(store, world_size, name):
    """Another right answer to 6.2: everybody looks at the counter until it is complete."""
    store.add(name, 1)
    while store.add(name, 0) < world_size:
        time.sleep(0.01)


@pytest.mark.parametrize("barrier", [barring(), counting], ids=["key", "counter"])
def test_a_barrier_is_right(barrier, capsys):
    kit.check.exercise_6_2(barrier)
    assert capsys.readouterr().out.startswith("Exercise 6.2: right on 1, 2, 3, 4 and 5 ranks")


def calling(waits=True, catches=RuntimeError, sleeps=False, present=False):
    """Return an answer to 6.3; each argument can make it wrong in one way."""

    def who_is_missing(store, world_size, seconds):
        keys = [f"here/{rank}" for rank in range(world_size)]
        try:
            if waits:
                store.wait(keys, timedelta(seconds=seconds))
            if sleeps:
                time.sleep(seconds)
        except catches:
            pass
        return [rank for rank in range(world_size) if store.check([keys[rank]]) == present]

    return who_is_missing


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"waits": False}, "looks at once", "where all came on 2 ranks: wrong result\n"),
        (
            {"catches": KeyError},
            "error not caught",
            "where 1 rank never came on 2 ranks: it raised an error\n",
        ),
        ({"present": True}, "wrong ranks", "rank 0 should return [] but returns [0, 1]\n"),
        ({"waits": False, "sleeps": True}, "waits too long", "right, but it took 6 s though all r"),
    ],
)
def test_a_roll_call_that_is(wrong, name, fact):
    case = "exercise 6.3, who_is_missing(store, world_size, seconds), where "
    assert_mistake(kit.check.exercise_6_3, calling(**wrong), name, case, fact)


def test_a_roll_call_that_waits_for_each_rank(monkeypatch):
    monkeypatch.setattr(init_methods, "ABSENT", dict.fromkeys(SIZES, ([],)) | {4: ([1, 3],)})

    def who_is_missing(store, world_size, seconds):
        for rank in range(world_size):
            with suppress(RuntimeError):
                store.wait([f"here/{rank}"], timedelta(seconds=seconds))
        return calling(waits=False)(store, world_size, seconds)

    fact = "where 2 ranks never came on 4 ranks: right, but it took "
    assert_mistake(kit.check.exercise_6_3, who_is_missing, "waits for each", fact)


@mistake("6.3", "not a list", "rank 0 should return [] but returns 1\n")
def test_a_roll_call_that_returns_a_number(store, world_size, seconds):
    return 1


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
    kit.check.exercise_6_3(calling())
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
