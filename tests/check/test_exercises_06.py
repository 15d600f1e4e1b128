"""Wrong answers to the exercises of lesson 06, and the errors that the learner gets."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from answers import error_text

import ddp_kit as kit
from ddp_kit.check import init_methods
from ddp_kit.check.grader import Grader

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
    ("wrong", "words"),
    [
        ({"world_size": len}, "The world size is the number of all ranks, on all hosts together"),
        ({"rank": lambda before, sizes, local: local}, "That is the local rank. Add the ranks of"),
        (
            {"rank": lambda before, sizes, local: before * sizes[before] + local},
            "Hosts may have different numbers of ranks: add up those of the hosts before.",
        ),
        (
            {"rank": lambda before, sizes, local: sum(sizes[before + 1 :]) + local},
            "The first host of the list has ranks 0, 1 and so on",
        ),
        ({"join": sum}, "Return two numbers: the rank and the world size."),
    ],
)
def test_a_place_that_is(wrong, words):
    text = error_text(kit.check.exercise_6_1, placed(**wrong))
    assert text.startswith("exercise 6.1, place_of([(")
    assert " should return (" in text
    assert words in text


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
    ("wrong", "words"),
    [
        (
            {"waits": False},
            "on 2 ranks: rank 0 left the first barrier before rank 1 had come\nAfter adding 1",
        ),
        (
            {"own_keys": False},
            "on 2 ranks: rank 1 left the second barrier before rank 0 had come\nBegin the names",
        ),
        ({"last": 1}, "A rank waits for a key that no rank writes. The last rank to come sees"),
    ],
)
def test_a_barrier_that_is(wrong, words, monkeypatch):
    monkeypatch.setattr(init_methods, "STORE_LIMIT", timedelta(seconds=3))
    text = error_text(kit.check.exercise_6_2, barring(**wrong))
    assert text.startswith("exercise 6.2, barrier(store, world_size, name) on 2 ranks: ")
    assert words in text


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
    ("wrong", "words"),
    [
        (
            {"waits": False},
            "\nSome ranks come late: first wait for all keys, for at most `seconds`",
        ),
        ({"catches": KeyError}, "raises a RuntimeError when the time is up, and store.get waits"),
        ({"present": True}, "A rank r is missing if the key f'here/{r}' has not been written."),
        ({"waits": False, "sleeps": True}, "s though all ranks came\nWait for the keys, and not"),
    ],
)
def test_a_roll_call_that_is(wrong, words):
    text = error_text(kit.check.exercise_6_3, calling(**wrong))
    assert text.startswith("exercise 6.3, who_is_missing(store, world_size, seconds), where ")
    assert words in text


def test_a_roll_call_that_returns_a_number():
    text = error_text(kit.check.exercise_6_3, lambda store, world_size, seconds: 1)
    assert text.endswith("Return a list of ranks; an empty one if nobody is missing.")


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
