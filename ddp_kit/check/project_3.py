"""The milestones of project 3: an all_reduce is right, also in any order, and sends little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_kit.check.grader import UNCHANGED, Grader, drawn, in_place, same
from ddp_kit.check.project import project
from ddp_kit.check.random_orders import Failed, Ranks
from ddp_kit.error_text import count
from ddp_kit.errors import DeadlockError, MismatchError, RankError
from ddp_kit.trace.schedule import schedule

SHAPES = ((60,), (7,), (3, 5), (), (100_003,))  # 60 divides by every world size
SMALL, LARGE = 250, 1_000_000  # float32: the smallest and the largest tensors of the mix
ORDERS = {SMALL: 40, 7: 20, LARGE: 3}  # how many random orders, by the size of the tensor
ROUNDS = {2: 1, 4: 2, 5: 4}  # by the number of ranks


class SumGrader(Grader):
    """Grades an all_reduce."""

    def check_sum(self, shape: tuple[int, ...], ranks: int) -> Any:
        """Run the answer, and fail unless each rank has the sum."""
        held = drawn(ranks, *shape)
        total, numbers = sum(held[1:], held[0]), held[0].numel()
        case = f"all_reduce of {count(numbers, 'number')}"
        result = self.run(in_place, held, world_size=ranks, case=case)
        mistakes = {
            UNCHANGED: held,
            "on rank 0 only": [total, *held[1:]],
            "too often": bool((result[0] > total).all()),
            "wrong chunks": numbers % ranks > 0,
            "wrong sum": True,
        }
        self.compare([total] * ranks, result, mistakes)
        return result


def _right(grader: SumGrader) -> None:
    for ranks in (2, 3, 4, 5):
        for shape in SHAPES:
            grader.check_sum(shape, ranks)


def _in_any_order(grader: SumGrader) -> None:
    for shape in SHAPES[:2]:  # what is wrong in every order has other reasons
        grader.check_sum(shape, 3)
    for ranks in (2, 3, 4, 5):
        [found] = grader.run(_try_orders, ranks, world_size=1)
        if found:
            numbers, seed, mistake, text = found
            grader.case = f"all_reduce of {count(numbers, 'number')} on {count(ranks, 'rank')}"
            grader.case += f", in the random order {seed}"
            grader.fail(text, hint=mistake)


def _few_bytes(grader: SumGrader) -> None:
    numbers = LARGE + 3
    for ranks in (2, 3, 4):
        grader.check_sum((numbers,), ranks)
        grader.check_sent(2 * (ranks - 1) * -(-numbers // ranks) * 4, "too many bytes")


def _few_rounds(grader: SumGrader) -> None:
    for ranks, most in ROUNDS.items():
        result = grader.check_sum((SMALL,), ranks)
        taken = schedule(result.trace).length
        if taken > most:
            mistake = "a ring" if taken == 2 * (ranks - 1) else "one after the other"
            needed = f"where {most} would be enough"
            grader.fail(f"right, but it takes {count(taken, 'round')} {needed}", hint=mistake)


def _try_orders(rank: int, world_size: int, answer: Callable, ranks: int) -> Any:
    """Return the first random order in which the answer fails, with the mistake; None if none."""
    for numbers, orders in ORDERS.items():
        held = drawn(ranks, numbers)
        total = sum(held[1:], held[0])
        for seed in range(orders):
            tensors = [each.clone() for each in held]
            found: dict[int, torch.Tensor] = {}

            def call(own: int, tensors: Any = tensors, found: Any = found) -> None:
                answer(tensors[own])
                found[own] = tensors[own].clone()
                tensors[own].fill_(torch.nan)  # as a caller may who goes on

            try:
                Ranks(ranks, seed).run(call, range(ranks))
            except Failed as error:
                return numbers, seed, error.mistake, str(error)
            for own in range(ranks):
                if not same(total, found[own]):
                    place = int((found[own] != total).nonzero()[0])
                    should = f"number {place} of rank {own} should be {total[place]:g}"
                    text = f"{should} but is {found[own][place]:g}"
                    return numbers, seed, "written too early", text
    return None


project(
    "P3",
    "all_reduce(tensor)",
    {
        "right on 2 to 5 ranks": _right,
        "right in any order": _in_any_order,
        "no more bytes than needed": _few_bytes,
        "few rounds for small tensors": _few_rounds,
    },
    graded_by=SumGrader,
    on_failure={
        DeadlockError: "waits in a circle",
        MismatchError: "other lengths",
        RankError: "raises",
    },
    collectives=False,
)
