"""Graders of lesson 05: the device, the backend and the threads of a rank, by its environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_kit.check.grader import Grader, exercise, hint_for
from ddp_kit.error_text import count
from ddp_kit.errors import RankError

# Hosts, ranks on each, and GPUs or cores of each.
ON_GPUS = ((1, 2, 2), (1, 3, 0), (2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 2, 4))
ALONE = ((1, None, 2), (1, None, 0))
ON_CORES = ((1, 2, 8), (2, 2, 8), (1, 3, 8), (1, 5, 4), (1, 1, 6))


def _where(case: tuple[int, int | None, int]) -> str:
    hosts, ranks, _ = case
    return "alone" if ranks is None else f"on {count(hosts, 'host')}"


@exercise(
    "5.1",
    "place(environ, gpus)",
    where="on one host and on two, with and without GPUs, and alone",
    on_failure={RankError: "environ misread"},
    cases=(*ON_GPUS, *ALONE),
    part=_where,
)
def _place(grader: Grader, hosts: int, ranks: int | None, gpus: int) -> None:
    n = hosts * (ranks or 1)
    case = f"place(environ, gpus={gpus}), {count(hosts, 'host')}"
    case = f"place({{}}, gpus={gpus})" if ranks is None else case
    given = [(_environ(rank, n, ranks), gpus) for rank in range(n)]
    found = [_as_strings(returned) for returned in grader.call(given, case)]
    local = [rank % (ranks or 1) for rank in range(n)]
    enough = gpus >= (ranks or 1)
    mistakes = {
        "alone differs": ranks is None,
        "not two values": any(not isinstance(each, tuple) or len(each) != 2 for each in found),
        "rank chooses gpu": enough and [(f"cuda:{rank}", "nccl") for rank in range(n)],
        "too few gpus": not enough and gpus > 0,
        "world size compared": (
            enough and any("cpu" in each for each in found if isinstance(each, tuple))
        ),
        "wrong place": True,
    }
    wanted = [(f"cuda:{rank}", "nccl") if enough else ("cpu", "gloo") for rank in local]
    grader.compare(wanted, found, mistakes, verb="return")


def _environ(rank: int, world_size: int, ranks: int | None) -> dict[str, str]:
    """Return what torchrun sets for a rank, with so many ranks on each host; None: it is alone."""
    if ranks is None:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank % ranks}
    numbers |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()}


def _as_strings(returned: Any) -> Any:
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return tuple(str(each) for each in returned)  # a torch.device is as good as its name
    return returned


@exercise(
    "5.2",
    "share_cores(environ, cores)",
    where="for 1 to 5 ranks on a host, on one host and on two, and alone",
    on_failure={RankError: "bad number"},
    cases=(*ON_CORES, (1, None, 6)),
    part=_where,
)
def _share_cores(grader: Grader, hosts: int, ranks: int | None, cores: int) -> None:
    case = f"share_cores(environ, cores={cores}), {count(hosts, 'host')}"
    case = f"share_cores({{}}, cores={cores})" if ranks is None else case
    each = ranks or 1
    n = hosts * each
    found = list(grader.run(_threads, ranks, cores, world_size=n, case=case))
    wanted = max(1, cores // each)
    wrong = [
        f"rank {rank} should have {count(wanted, 'thread')} but has {threads}"
        for rank, threads in enumerate(found)
        if threads != wanted
    ]
    mistakes = {
        "not set": [7] * n,
        "all cores": [cores] * n,
        "world size divides": [max(1, cores // n)] * n,
        "other number": True,
    }
    if wrong:
        grader.fail("wrong result", *wrong, hint=hint_for(found, mistakes))


def _threads(rank: int, world_size: int, share_cores: Callable, ranks: int | None, cores: int):
    before = torch.get_num_threads()
    torch.set_num_threads(7)  # which is never right
    try:
        share_cores(_environ(rank, world_size, ranks), cores)
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
