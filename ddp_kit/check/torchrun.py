"""Graders of lesson 11: torchrun's variables, a checkpoint to resume from, ranks of a host."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ddp_kit.check.compared import hunt
from ddp_kit.check.grader import SIZES, STORE_LIMIT, Grader, by_size, exercise, open_store
from ddp_kit.errors import RankError

PER_HOST = 2
LOCAL_SIZES = (2, 1, 4, 3, 2)  # how many ranks each host has in 11.3


@exercise(
    "11.1",
    "my_place(gpus)",
    "with GPUs and without",
    cases=[(n, gpus) for n in (4, *SIZES) for gpus in (PER_HOST, 0)],
    part=lambda case: "with GPUs" if case[1] else "without GPUs",
)
def _my_place(grader: Grader, world_size: int, gpus: int) -> None:
    result = grader.run(_read_place, gpus, world_size=world_size, case=f"my_place({gpus})")
    places = [divmod(rank, PER_HOST) for rank in range(world_size)]
    wanted = [(host, f"cuda:{local}" if gpus else "cpu") for host, local in places]
    found = list(result)
    grader.compare(wanted, found, _mistake_in(found, wanted, gpus), verb="return")


@exercise(
    "11.2",
    "resume(folder, weights)",
    "with a checkpoint and without",
    on_failure="rank 0 only",
    others=("the next step",),
)
def _resume(grader: Grader, world_size: int) -> None:
    for step in (3, None):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
            if step is not None:
                saved = {"step": step, "weights": torch.tensor([5.0, 6.0, 7.0])}
                torch.save(saved, Path(folder, "checkpoint.pt"))
            case = f"resume {'with' if step else 'without'} a checkpoint"
            result = grader.run(_resume_training, folder, empty, world_size=world_size, case=case)
        steps = [value["step"] for value in result]
        weights = [value["weights"] for value in result]
        kept = torch.tensor([5.0, 6.0, 7.0]) if step else torch.ones(3)
        mistakes = {
            "weights changed": step is None,
            "rank 0 only": torch.equal(weights[0], kept),
            "not copied": True,
        }
        grader.compare([kept] * world_size, weights, mistakes, place=" in weights")
        wanted = [step or 0] * world_size
        mistake = "wrong step" if step else "not step 0"
        grader.compare(wanted, steps, mistake, verb="return", part="the next step")


@exercise(
    "11.3",
    "ranks_here(store, host, local_world_size)",
    where="on 1, 2, 3, 4 and 5 hosts with 1 to 4 ranks each",
    on_failure={RankError: "not set"},
    part=by_size(SIZES, "host"),
)
def _ranks_here(grader: Grader, hosts: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "store"))
        result = grader.run(_count_ranks, path, STORE_LIMIT, world_size=hosts)
    sizes = LOCAL_SIZES[:hosts]
    first = [sum(sizes[:host]) for host in range(hosts)]
    mistakes = {
        "no list": not all(isinstance(value, list) for value in result),
        "equal hosts": (
            [list(range(host * size, (host + 1) * size)) for host, size in enumerate(sizes)]
        ),
        "wrong first rank": True,
    }
    wanted = [list(range(begin, begin + size)) for begin, size in zip(first, sizes, strict=True)]
    grader.compare(wanted, result, mistakes, verb="return")


def _mistake_in(found: list, wanted: list, gpus: int) -> str:
    if any(not isinstance(value, tuple) or len(value) != 2 for value in found):
        return "not a pair"
    hosts, devices = zip(*found, strict=True)
    if any(isinstance(host, str) for host in hosts):
        return "host as text"
    if not gpus:
        return "no cpu"
    if list(devices) == [f"cuda:{rank}" for rank in range(len(found))] and len(found) > PER_HOST:
        return "rank as device"
    if list(hosts) != [host for host, _ in wanted]:
        return "wrong host"
    return "wrong device"


def _read_place(rank: int, world_size: int, my_place: Callable, gpus: int) -> Any:
    host, local_rank = divmod(rank, PER_HOST)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": host,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": PER_HOST,
    }
    with patch.dict(os.environ, {name: str(number) for name, number in numbers.items()}):
        return my_place(gpus)


def _resume_training(rank: int, world_size: int, resume: Callable, folder: str, empty: str) -> dict:
    weights = torch.ones(3)
    step = resume(folder if rank == 0 else empty, weights)
    return {"step": step, "weights": weights}


def _count_ranks(rank: int, world_size: int, answer: Callable, path: str, limit: timedelta) -> Any:
    return answer(open_store(path, world_size, limit), rank, LOCAL_SIZES[rank])


hunt("11.9")
