"""Graders of lesson 01: ping-pong, and three deadlocks to find and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_kit.check.grader import (
    IN_PLACE,
    SENT,
    SIZES,
    Credit,
    Grader,
    brought,
    hint_if_unchanged,
    in_place,
    same,
)


def exercise_1_1(ping_pong: Callable[[torch.Tensor, int], Any]) -> Credit:
    """Grade `ping_pong(counter, rounds)` on 2, 3 and 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("1.1", "ping_pong(counter, rounds)", ping_pong)
    for world_size in grader.each((2, 3, 5), SENT):
        for rounds in (1, 3):
            held = [torch.tensor([100 * rank]) for rank in range(world_size)]
            case = f"ping_pong(counter, rounds={rounds})"
            result = grader.run(in_place, held, rounds, world_size=world_size, case=case)
            wanted = [torch.tensor([2 * rounds]), torch.tensor([2 * rounds - 1]), *held[2:]]
            first_came = [torch.tensor([1]), torch.tensor([0])]  # what the first message brought
            grader.compare(
                wanted,
                result,
                f"Ranks 0 and 1 hold what they received, with nothing added. {IN_PLACE}"
                if same(first_came, list(result.values[:2]))
                else "Each message carries the counter, and the rank that receives it adds 1: "
                "first rank 1, then rank 0, and so on. All other ranks leave theirs alone.",
            )
            grader.check_total_sent(
                2 * rounds, 16 * rounds, "A round is one message there and one back."
            )
    return grader.passed("right on 2, 3 and 5 ranks, two messages a round")


def exercise_1_2(shift: Callable[[torch.Tensor], Any]) -> Credit:
    """Grade `shift(tensor)`, the first deadlock fixed, on 2 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("1.2", "shift(tensor)", shift)
    for world_size in grader.each((2, 3, 4, 5), SENT):
        held = brought(world_size, 4)
        result = grader.run(_returned_and_held, held, world_size=world_size)
        wanted = [held[rank - 1] for rank in range(world_size)]
        grader.compare(
            wanted,
            [returned for returned, _ in result],
            "Send the tensor to `right`, and receive from `left`.",
            verb="return",
        )
        grader.compare(
            held,
            [kept for _, kept in result],
            "Receive into `arriving`: `tensor` must stay as it was.",
        )
        grader.check_total_sent(
            world_size, 16 * world_size, "One message from each rank is enough."
        )
    return grader.passed("right on 2, 3, 4 and 5 ranks, one message a rank")


def exercise_1_3(running_sum: Callable[[torch.Tensor], Any]) -> Credit:
    """Grade `running_sum(tensor)`, the second deadlock fixed, on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("1.3", "running_sum(tensor)", running_sum)
    for world_size in grader.each(SIZES, SENT):
        held = brought(world_size, 3)
        result = grader.run(in_place, held, world_size=world_size)
        wanted = [sum(held[1 : rank + 1], held[0]) for rank in range(world_size)]
        grader.compare(
            wanted,
            result,
            hint_if_unchanged(held, result.values)
            or "A rank adds what it receives from the left to its `tensor`, in place. It passes "
            "that sum on, so it adds before it sends.",
        )
        grader.check_total_sent(
            world_size - 1,
            12 * (world_size - 1),
            "Each rank except the last sends one message, to the rank on its right.",
        )
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, one message from each rank but the last")


def exercise_1_4(stream: Callable[[list[int] | None], Any]) -> Credit:
    """Grade `stream(items)`, the third deadlock fixed, on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("1.4", "stream(items)", stream)
    for world_size in grader.each(SIZES, SENT):
        for items in ([3, 1, 4], []):
            case = f"stream({items})"
            result = grader.run(_stream, items, world_size=world_size, case=case)
            grader.compare(
                [items] * world_size,
                result,
                "Send every item to every other rank, in order, and then END, which is not an "
                "item. Rank 0 returns its items, too.",
                verb="return",
            )
            messages = (len(items) + 1) * (world_size - 1)
            grader.check_total_sent(
                messages, 8 * messages, "Send each item, and END, to each rank once."
            )
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, also for an empty list")


def _returned_and_held(rank: int, world_size: int, shift: Callable, held: list) -> tuple:
    tensor = held[rank].clone()
    return shift(tensor), tensor


def _stream(rank: int, world_size: int, stream: Callable, items: list[int]) -> Any:
    return stream(items if rank == 0 else None)
