"""Graders of lesson 06: ranks from a list of hosts, a barrier and a roll call by a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any

from ddp_kit.check.grader import SIZES, STORE_LIMIT, Grader, exercise, open_store
from ddp_kit.error_text import count
from ddp_kit.errors import RankError

# Each list as the exercise gives it: hosts in their order, with their number of ranks.
HOST_LISTS = (
    [("alpha", 2), ("beta", 2)],
    [("beta", 1), ("alpha", 3)],
    [("gamma", 2), ("alpha", 1), ("beta", 2)],
)
# Ranks that never come, by world size. Each such case takes seconds.
ABSENT = {2: ([], [1]), 3: ([], [2]), 1: ([],), 4: ([], [1, 3]), 5: ([], [4])}
SECOND = "a second barrier"
LATE, LATER = 0.3, 2.0  # seconds; wrong answers are found in the first run, which gets more time


@exercise(
    "6.1",
    "place_of(hosts, host, local_rank)",
    where="for 4 and 5 ranks on two and three hosts",
    cases=HOST_LISTS,
    part=lambda hosts: f"on {count(len(hosts), 'host')}",
)
def _place_of(grader: Grader, hosts: list[tuple[str, int]]) -> None:
    places = [(host, local) for host, ranks in hosts for local in range(ranks)]
    n = len(places)
    case = f"place_of({hosts}, host, local_rank)"
    returned = grader.call([(hosts, *place) for place in places], case)
    found = [tuple(value) if isinstance(value, list) else value for value in returned]
    wanted = [(rank, n) for rank in range(n)]
    grader.compare(wanted, found, _misplaced(hosts, places, found), verb="return")


@exercise(
    "6.2",
    "barrier(store, world_size, name)",
    "two barriers one after the other",
    on_failure="key never written",
    collectives=False,
    others=(SECOND,),
)
def _barrier(grader: Grader, world_size: int) -> None:
    with TemporaryDirectory() as folder:
        path, late = f"{folder}/store", LATER if world_size == SIZES[0] else LATE
        result = grader.run(_pass_barriers, path, STORE_LIMIT, late, world_size=world_size)
    for number, name in enumerate(("first", "second")):
        for rank, missing in enumerate(result):
            if missing[number]:
                fact = f"rank {rank} left the {name} barrier before rank {missing[number][0]}"
                hint, part = ("same keys", SECOND) if number else ("nobody waits", "")
                grader.fail(f"{fact} had come", hint=hint, part=part)


@exercise(
    "6.3",
    "who_is_missing(store, world_size, seconds)",
    "with and without missing ones",
    on_failure={RankError: "error not caught"},
    collectives=False,
    others=("returns when all have come",),
)
def _who_is_missing(grader: Grader, world_size: int) -> None:
    for absent in ABSENT[world_size]:
        seconds = 3.0 if absent else 6.0
        case = f"{grader.form}, where {_who(absent)}"
        with TemporaryDirectory() as folder:
            result = grader.run(
                _call_the_roll,
                f"{folder}/store",
                STORE_LIMIT,
                absent,
                seconds,
                world_size=world_size,
                case=case,
            )
        found, took = result[0]
        mistakes = {
            "not a list": not isinstance(found, list),
            "looks at once": (
                isinstance(found, list) and 0 not in found and set(absent) < set(found)
            ),
            "wrong ranks": True,
        }
        grader.compare([absent], [found], mistakes, verb="return")
        if not absent and took >= seconds:
            fact = f"right, but it took {took:.0f} s though all ranks came"
            grader.fail(fact, hint="waits too long", part="returns when all have come")


def _misplaced(hosts: list, places: list, found: list) -> str:
    """Return the mistake in pairs of rank and world size."""
    if not all(isinstance(value, tuple) and len(value) == 2 for value in found):
        return "not two numbers"
    ranks, sizes = zip(*found, strict=True)
    if set(sizes) != {len(places)}:
        return "wrong world size"
    if list(ranks) == [local for _, local in places]:
        return "local rank"
    order = [host for host, _ in hosts]
    if list(ranks) == [order.index(host) * dict(hosts)[host] + local for host, local in places]:
        return "equal hosts"
    return "other order"


def _pass_barriers(
    rank: int, world_size: int, barrier: Callable, path: str, limit: timedelta, seconds: float
) -> list[list[int]]:
    """Pass two barriers; return for each the ranks that had not come when this one left it.

    A different rank is late each time. It comes when another one has left, and after some seconds
    if none does, as is right.
    """
    store = open_store(path, world_size, limit)
    early = []
    for name, late in (("first", world_size - 1), ("second", 0)):
        end = time.monotonic() + seconds
        while rank == late and not store.check([f"{name} left"]) and time.monotonic() < end:
            time.sleep(0.01)
        store.set(f"{name} came {rank}", "")
        barrier(store, world_size, name)
        early.append([r for r in range(world_size) if not store.check([f"{name} came {r}"])])
        store.set(f"{name} left", "")
    return early


def _call_the_roll(
    rank: int,
    world_size: int,
    who_is_missing: Callable,
    path: str,
    limit: timedelta,
    absent: list[int],
    seconds: float,
) -> tuple[Any, float] | None:
    """Let rank 0 call the answer, and all others that are not absent write their key late.

    Rank 0 begins when the others are ready: on a busy machine they may start seconds later.
    """
    store = open_store(path, world_size, limit)
    if rank in absent:
        return None
    if rank > 0:
        store.set(f"ready/{rank}", "")
        store.wait(["begun"])
        time.sleep(LATE)
        store.set(f"here/{rank}", "")
        return None
    if ready := [f"ready/{r}" for r in range(1, world_size) if r not in absent]:
        store.wait(ready)
    store.set("here/0", "")
    store.set("begun", "")
    begin = time.monotonic()
    return who_is_missing(store, world_size, seconds), time.monotonic() - begin


def _who(absent: list[int]) -> str:
    return f"{count(len(absent), 'rank')} never came" if absent else "all came"
