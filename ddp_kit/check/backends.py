"""Graders of lesson 10: a time for all ranks, a backend for a device, a compressed all_reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.check.grader import (
    IN_PLACE,
    SENT,
    SIZES,
    Credit,
    Grader,
    brought,
    hint_if_unchanged,
    in_place,
)

ROUNDS, WARM_UP = 4, 100.0  # seconds of a clock that the grader sets
HUGE = 2.0**17  # beyond float16, and exact in bfloat16, as are its multiples up to 5
_DEVICES = {"cpu": "the CPU", "cuda": "GPUs"}
# Where tensors are, and how many ranks share a GPU.
PLACES = (
    ({"cpu"}, 0),
    ({"cuda"}, 1),
    ({"cpu", "cuda"}, 1),
    ({"cuda"}, 2),
    ({"cpu", "cuda"}, 2),
)


def exercise_10_1(slowest_rounds: Callable[[Callable, Callable, int], Any]) -> Credit:
    """Grade `slowest_rounds(operation, clock, rounds)` on 1 to 5 ranks, with a clock that is set.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    form = "slowest_rounds(operation, clock, rounds)"
    grader = Grader("10.1", form, slowest_rounds, collectives=True)
    for world_size in grader.each(SIZES):
        found = list(grader.run(_slowest_rounds, world_size=world_size))
        own = [_seconds(rank, world_size) for rank in range(world_size)]
        wanted = [max(times) for times in zip(*own, strict=True)][1:]
        grader.compare([wanted] * world_size, found, _hint_for_rounds(own, found), verb="return")
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks")


def exercise_10_2(backend_for: Callable[[set[str], int], Any]) -> Credit:
    """Grade `backend_for(devices, ranks_per_gpu)` for tensors on the CPU, on GPUs, and on both.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("10.2", "backend_for(devices, ranks_per_gpu)", backend_for)
    for devices, ranks in grader.each(PLACES, part=_devices):
        case = f"backend_for({{{str(sorted(devices))[1:-1]}}}, {ranks})"
        found = grader.run(_backend_for, devices, ranks, world_size=1, case=case)[0]
        fact, hint = _judge_backend(found, devices, ranks)
        if fact:
            grader.fail(f"it returns {found!r}, {fact}", hint=hint)
    return grader.passed("right for tensors on the CPU, on GPUs, and on both")


def exercise_10_3(compressed_all_reduce: Callable[[torch.Tensor], Any]) -> Credit:
    """Grade `compressed_all_reduce(tensor)` on 1 to 5 ranks: its sums, and the bytes it sends.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    form = "compressed_all_reduce(tensor)"
    grader = Grader("10.3", form, compressed_all_reduce, collectives=True)
    cases = [(n, huge) for n in SIZES for huge in (False, True)]
    for world_size, huge in grader.each(cases, SENT, part=_range):
        held = [torch.full((3,), HUGE)] * world_size if huge else brought(world_size, 8)
        found = list(grader.run(in_place, held, world_size=world_size))
        total = sum(held[1:], held[0])
        hint = _hint_for_sums(total, held, found)
        grader.compare([total] * world_size, found, hint)
        sent = sum(event.nbytes for event in grader.collectives())
        hint = "Send the tensor in bfloat16, which has two bytes for each number, and once."
        grader.check_at_most(" in collectives by rank 0", sent, 2 * total.numel(), "byte", hint)
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, with two bytes for each number")


def _devices(place: tuple[set[str], int]) -> str:
    return f"tensors on {' and on '.join(_DEVICES[each] for each in sorted(place[0]))}"


def _range(case: tuple[int, bool]) -> str:
    return "numbers beyond 65,504, where float16 ends" if case[1] else "small numbers"


def _seconds(rank: int, world_size: int) -> list[float]:
    """Return how long each round takes on a rank; in each, another rank is the slowest."""
    rounds = [10.0 + 10 * (i % world_size == rank) + i for i in range(1, ROUNDS + 1)]
    return [WARM_UP, *rounds]


def _slowest_rounds(rank: int, world_size: int, slowest_rounds: Callable) -> Any:
    now, left = 0.0, _seconds(rank, world_size)

    def operation() -> None:
        nonlocal now
        now += left.pop(0) if left else 1000.0

    return slowest_rounds(operation, lambda: now, ROUNDS)


def _hint_for_rounds(own: list[list[float]], found: list) -> str:
    slowest = [max(times) for times in zip(*own, strict=True)]
    total = [sum(times) for times in zip(*own, strict=True)]
    if any(not isinstance(each, list) for each in found):
        return "Return a list of numbers, one for each round; a tensor has tolist()."
    if len(own) > 1 and found in ([times[1:] for times in own], own):
        return "Each rank returns its own times. Take the largest of all ranks: ReduceOp.MAX."
    if all(each == slowest for each in found):
        return "The first round warms up. Leave it out."
    if len(own) > 1 and found[0] in (total, total[1:]):
        return "That is the sum over the ranks. Take the largest instead: op=dist.ReduceOp.MAX."
    return "Round i takes as long as its slowest rank; the round before the first one warms up."


def _backend_for(rank: int, world_size: int, backend_for: Callable, devices: set, ranks: int):
    return backend_for(set(devices), ranks)


def _judge_backend(found: Any, devices: set[str], ranks: int) -> tuple[str, str]:
    """Return what is wrong with a backend, and a hint; "" if nothing is."""
    names = 'Return a string such as "gloo", or "cpu:gloo,cuda:nccl": devices with backends.'
    if not isinstance(found, str):
        return "which is not a string", names
    served = _served(found)
    if served is None:
        return "which PyTorch does not know", names
    if missing := sorted(devices - set(served)):
        where = {"cpu": "the CPU", "cuda": "a GPU"}[missing[0]]
        return (
            f"which serves no tensors on {where}",
            'nccl alone is for GPUs. With tensors on both, name both: "cpu:gloo,cuda:nccl".',
        )
    asked = {"gloo", "nccl"} if "cuda" in devices else {"gloo"}
    if others := sorted(set(served.values()) - asked):
        if others == ["nccl"]:
            return "which needs a GPU", "All tensors are on the CPU: gloo is enough."
        return f"which names {others[0]}", "Choose gloo for the CPU, and nccl or gloo for GPUs."
    if served.get("cpu") == "nccl":
        return "which gives tensors on the CPU to nccl", "nccl moves tensors of GPUs only."
    if "cuda" in devices and ranks > 1 and served["cuda"] == "nccl":
        return (
            f"but {ranks} ranks share a GPU",
            "nccl refuses a GPU that another rank has. gloo does not.",
        )
    if "cuda" in devices and ranks == 1 and served["cuda"] == "gloo":
        return (
            "which sends tensors of GPUs by gloo",
            "It works, but gloo copies them to the CPU first. Each rank has its own GPU: use nccl.",
        )
    return "", ""


def _served(backend: str) -> dict[str, str] | None:
    """Return the backend of each device; None for names that PyTorch does not know."""
    if ":" not in backend:
        known = dist.Backend.backend_capability.get(backend.lower())
        return known and dict.fromkeys(known, backend.lower())
    pairs = [pair.strip().split(":") for pair in backend.lower().split(",")]
    if any(len(p) != 2 or p[1] not in dist.Backend.backend_capability for p in pairs):
        return None
    return dict(pairs)


def _hint_for_sums(total: torch.Tensor, held: list, found: list) -> str:
    if any(torch.isinf(each).any() for each in found):
        return "float16 ends at 65,504. Use bfloat16, which has the range of float32."
    if len(held) > 1 and (unchanged := hint_if_unchanged(held, found)):
        return unchanged
    if all(torch.equal(each * len(held), total) for each in found):
        return "That is the mean. Return the sum, as all_reduce does."
    return f"The sum of all ranks goes back into the tensor, which stays float32. {IN_PLACE}"
