"""Graders of lesson 10: a time for all ranks, a backend for a device, a compressed all_reduce."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_kit.check.compared import MANY, alone, compared
from ddp_kit.check.grader import SIZES, Grader, brought, exercise, in_place

ROUNDS, WARM_UP = 4, 100.0  # seconds of a clock that the grader sets
HUGE = 2.0**17  # beyond float16, and exact in bfloat16, as are its multiples up to 5
_DEVICES = {"cpu": "the CPU", "cuda": "GPUs"}
# Where tensors are, and how many ranks share a GPU.
PLACES = (({"cpu"}, 0), ({"cuda"}, 1), ({"cpu", "cuda"}, 1), ({"cuda"}, 2), ({"cpu", "cuda"}, 2))


def _seconds(rank: int, world_size: int) -> list[float]:
    """Return how long each round takes on a rank; in each, another rank is the slowest."""
    rounds = [10.0 + 10 * (i % world_size == rank) + i for i in range(1, ROUNDS + 1)]
    return [WARM_UP, *rounds]


@compared("10.1", "slowest_rounds(operation, clock, rounds)", sizes=SIZES, spare=None)
def _slowest_rounds(rank: int, world_size: int, slowest_rounds: Callable) -> Any:
    now, left = 0.0, _seconds(rank, world_size)

    def operation() -> None:
        nonlocal now
        now += left.pop(0) if left else 1000.0

    return slowest_rounds(operation, lambda: now, ROUNDS)


@exercise(
    "10.2",
    "backend_for(devices, ranks_per_gpu)",
    where="for tensors on the CPU, on GPUs, and on both",
    cases=PLACES,
    part=lambda place: f"tensors on {' and on '.join(map(_DEVICES.get, sorted(place[0])))}",
)
def _backend_for(grader: Grader, devices: set[str], ranks: int) -> None:
    case = f"backend_for({{{str(sorted(devices))[1:-1]}}}, {ranks})"
    (found,) = grader.call([(devices, ranks)], case)
    fact, mistake = _judge_backend(found, devices, ranks)
    if fact:
        grader.fail(f"it returns {found!r}, {fact}", hint=mistake)


def _range(case: tuple[int, bool]) -> str:
    return "numbers beyond 65,504, where float16 ends" if case[1] else "small numbers"


@compared(
    "10.3",
    "compressed_all_reduce(tensor)",
    "with two bytes for each number",
    sizes=SIZES,
    cases=[(n, huge) for n in SIZES for huge in (False, True)],
    part=_range,
)
def _compressed_all_reduce(rank: int, n: int, all_reduce: Callable, huge: bool) -> torch.Tensor:
    held = [torch.full((3,), HUGE)] * n if huge else brought(n, 8)
    return in_place(rank, n, all_reduce, held)


@compared("10.9", "TopK(k)", kind="function")
def _top_k(rank: int, world_size: int, top_k: Callable) -> dict:
    averages, found = {2: top_k(2), 1: top_k(1)}, {}
    numbers = ([8, -12, 1, 2, 3, 5], [7, 1, -16, 4, 2, 9], [-1, 9, 3, -10, 4, 2])[rank]
    for k, step in ((2, 1), (2, 2), (2, 3), (2, 4), (1, 1)):
        # The zeros make the whole tensor much larger than what may be sent of it.
        tensor = torch.tensor([*numbers, *[0.0] * 6]).view(3, 4) * (1 if step < 3 else 0.5)
        averages[k](tensor)
        found[f"the tensor after step {step} with k={k}"] = tensor
    return found


@compared("10.a", "votes(yes)", spare=MANY)
def _votes(rank: int, world_size: int, votes: Callable) -> dict:
    found, sizes, all_reduce = {}, [], dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        sizes.append(tensor.element_size())
        return all_reduce(tensor, *args, **named)

    for votes_of in (("TTFT", "TFFT", "TTFF"), ("FTF", "FFF", "TFF")):  # in one all agree
        yes = torch.tensor([vote == "T" for vote in votes_of[rank]])
        with patch.object(dist, "all_reduce", noted):
            some, every, count = votes(yes)
        of = f" of {len(yes)}"
        found |= {f"any rank{of}": some, f"every rank{of}": every, f"`yes` afterwards{of}": yes}
        found[f"how many ranks{of}"] = count.long()
    return found | {"whether bytes are added up": 1 in sizes}


@compared("10.b", "measure(rank, world_size, operation, sizes, dtype, most)")
def _measure_sizes(rank: int, world_size: int, measure: Callable) -> dict:
    now, barriers, barrier = 0.0, 0, dist.barrier

    def noted_barrier(*args: Any, **named: Any) -> Any:
        nonlocal now, barriers
        now, barriers = now + 1000, barriers + 1
        return barrier(*args, **named)

    def operation(tensor: torch.Tensor) -> None:
        nonlocal now
        now += barriers + tensor.nbytes / 1e6 + 100 * rank

    clock = patch.object(time, "perf_counter", lambda: now)
    with clock, patch.object(dist, "barrier", noted_barrier):
        samples = measure(rank, world_size, operation, (8, 2_000_000), torch.float32, 6)
    sizes = ("8 bytes", "2,000,000 bytes")
    return {f"the seconds of {size}": each for size, each in zip(sizes, samples, strict=True)}


@alone("10.c", "fit_by_hand(points)")
def _fit_by_hand(fit_by_hand: Callable) -> dict:
    found = {}
    for alpha, beta in ((2e-4, 5e-10), (1e-6, 1e-9)):
        points = [(n, (alpha + beta * n) * (1.2 if n == 4000 else 1)) for n in (4, 4000, 4_000_000)]
        about = f"for {alpha:g} + {beta:g} * bytes"
        found[f"alpha {about}"], found[f"beta {about}"] = fit_by_hand(points)
    return found


def _judge_backend(found: Any, devices: set[str], ranks: int) -> tuple[str, str]:
    """Return what is wrong with a backend, and the mistake; "" if nothing is."""
    if not isinstance(found, str):
        return "which is not a string", "no backend"
    served = _served(found)
    if served is None:
        return "which PyTorch does not know", "no backend"
    if missing := sorted(devices - set(served)):
        where = {"cpu": "the CPU", "cuda": "a GPU"}[missing[0]]
        return f"which serves no tensors on {where}", "device left out"
    asked = {"gloo", "nccl"} if "cuda" in devices else {"gloo"}
    if others := sorted(set(served.values()) - asked):
        if others == ["nccl"]:
            return "which needs a GPU", "nccl without GPUs"
        return f"which names {others[0]}", "another backend"
    if served.get("cpu") == "nccl":
        return "which gives tensors on the CPU to nccl", "nccl on the CPU"
    if "cuda" in devices and ranks > 1 and served["cuda"] == "nccl":
        return f"but {ranks} ranks share a GPU", "nccl on shared GPUs"
    if "cuda" in devices and ranks == 1 and served["cuda"] == "gloo":
        return "which sends tensors of GPUs by gloo", "gloo on own GPUs"
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
