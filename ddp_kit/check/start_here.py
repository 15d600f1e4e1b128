"""Graders of lesson 00: the first workers, which return, add up and share a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_kit.check.compared import MANY, called, compared

NUMBERS = [7, 2, 9, 5, 1, 8, 3, 6]  # more than there are ranks; all parts have different sums


def _with_numbers(rank: int, world_size: int, worker: Callable) -> Any:
    return worker(rank, world_size, list(NUMBERS))


compared("0.a", "after_me(rank, world_size)")(called)
for _number, _name in (("0.b", "add_up"), ("0.c", "parallel_sum"), ("0.d", "report")):
    compared(
        _number,
        f"{_name}(rank, world_size, numbers)",
        spare=MANY,
        call=lambda n, name=_name: f"{name}(rank, {n}, {NUMBERS})",
    )(_with_numbers)
