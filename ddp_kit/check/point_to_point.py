"""Graders of lesson 01: ping-pong, and three deadlocks to find and fix."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_kit.check.compared import hunt
from ddp_kit.check.grader import (
    SENT,
    UNCHANGED,
    Grader,
    brought,
    exercise,
    in_place,
    same,
)


@exercise(
    "1.1",
    "ping_pong(counter, rounds)",
    "two messages a round",
    where="on 2, 3 and 5 ranks",
    collectives=False,
    cases=(2, 3, 5),
    others=(SENT,),
)
def _ping_pong(grader: Grader, world_size: int) -> None:
    for rounds in (1, 3):
        held = [torch.tensor([100 * rank]) for rank in range(world_size)]
        case = f"ping_pong(counter, rounds={rounds})"
        result = grader.run(in_place, held, rounds, world_size=world_size, case=case)
        wanted = [torch.tensor([2 * rounds]), torch.tensor([2 * rounds - 1]), *held[2:]]
        first_came = [torch.tensor([1]), torch.tensor([0])]  # what the first message brought
        unadded = same(first_came, list(result.values[:2]))
        grader.compare(wanted, result, {"nothing added": unadded, "wrong count": True})
        grader.check_total_sent(2 * rounds, 16 * rounds, "too many messages")


@exercise(
    "1.2",
    "shift(tensor)",
    "one message a rank",
    where="on 2, 3, 4 and 5 ranks",
    collectives=False,
    cases=(2, 3, 4, 5),
    others=(SENT,),
)
def _shift(grader: Grader, world_size: int) -> None:
    held = brought(world_size, 4)
    result = grader.run(_returned_and_held, held, world_size=world_size)
    wanted = [held[rank - 1] for rank in range(world_size)]
    grader.compare(wanted, [returned for returned, _ in result], "other way round", verb="return")
    grader.compare(held, [kept for _, kept in result], "overwritten")
    grader.check_total_sent(world_size, 16 * world_size, "too many messages")


def _returned_and_held(rank: int, world_size: int, shift: Callable, held: list) -> tuple:
    return shift(held[rank]), held[rank]


@exercise(
    "1.3",
    "running_sum(tensor)",
    "one message from each rank but the last",
    collectives=False,
    others=(SENT,),
)
def _running_sum(grader: Grader, world_size: int) -> None:
    held = brought(world_size, 3)
    result = grader.run(in_place, held, world_size=world_size)
    wanted = [sum(held[1 : rank + 1], held[0]) for rank in range(world_size)]
    unset = any(torch.isnan(tensor).any() for tensor in result)
    mistakes = {UNCHANGED: held, "not received": unset, "not a running sum": True}
    grader.compare(wanted, result, mistakes)
    grader.check_total_sent(world_size - 1, 12 * (world_size - 1), "too many messages")


@exercise("1.4", "stream(items)", "also for an empty list", collectives=False, others=(SENT,))
def _stream(grader: Grader, world_size: int) -> None:
    for items in ([3, 1, 4], []):
        given = [(items,), *[(None,)] * (world_size - 1)]
        found = grader.call(given, f"stream({items})")
        grader.compare([items] * world_size, found, "wrong items", verb="return")
        messages = (len(items) + 1) * (world_size - 1)
        grader.check_total_sent(messages, 8 * messages, "too many messages")


hunt("1.5")
