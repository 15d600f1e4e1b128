"""Graders of lesson 01: ping-pong, and three deadlocks to find and fix."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_kit.check.grader import (
    IN_PLACE,
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
        hints = {
            f"Ranks 0 and 1 hold what they received, with nothing added. {IN_PLACE}": (
                same(first_came, list(result.values[:2]))
            ),
            "Each message carries the counter, and the rank that receives it adds 1: first "
            "rank 1, then rank 0, and so on. All other ranks leave theirs alone.": True,
        }
        grader.compare(wanted, result, hints)
        hint = "A round is one message there and one back."
        grader.check_total_sent(2 * rounds, 16 * rounds, hint)


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
    hint = "Send the tensor to `right`, and receive from `left`."
    grader.compare(wanted, [returned for returned, _ in result], hint, verb="return")
    hint = "Receive into `arriving`: `tensor` must stay as it was."
    grader.compare(held, [kept for _, kept in result], hint)
    hint = "One message from each rank is enough."
    grader.check_total_sent(world_size, 16 * world_size, hint)


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
    hints = {
        UNCHANGED: held,
        "A rank adds what it receives from the left to its `tensor`, in place. It passes that "
        "sum on, so it adds before it sends.": True,
    }
    grader.compare(wanted, result, hints)
    hint = "Each rank except the last sends one message, to the rank on its right."
    grader.check_total_sent(world_size - 1, 12 * (world_size - 1), hint)


@exercise("1.4", "stream(items)", "also for an empty list", collectives=False, others=(SENT,))
def _stream(grader: Grader, world_size: int) -> None:
    for items in ([3, 1, 4], []):
        given = [(items,), *[(None,)] * (world_size - 1)]
        found = grader.call(given, f"stream({items})")
        hint = (
            "Send every item to every other rank, in order, and then END, which is not an "
            "item. Rank 0 returns its items, too."
        )
        grader.compare([items] * world_size, found, hint, verb="return")
        messages = (len(items) + 1) * (world_size - 1)
        hint = "Send each item, and END, to each rank once."
        grader.check_total_sent(messages, 8 * messages, hint)
