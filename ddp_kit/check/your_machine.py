"""Graders of lesson 05: what a rank knows from its environment, and where it should run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_kit.check.compared import compared
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


@compared("5.a", "synchronize()", sizes=(1, 2))
def _synchronize(rank: int, world_size: int, synchronize: Callable) -> dict:
    barrier, calls = dist.barrier, [0]

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return barrier(*args, **options)

    def missing(*args: Any) -> Any:
        raise ValueError("Default process group has not been initialized")

    found = {}
    with patch.object(dist, "barrier", counted):
        found["with a group"] = synchronize()
    found["barriers"] = calls[0]
    without = {"barrier": missing, "get_world_size": missing, "get_rank": missing}
    with patch.multiple(dist, is_initialized=lambda: False, **without):
        found["without a group"] = _text_of(synchronize)
    without |= {"is_initialized": missing}
    with patch.multiple(dist, is_available=lambda: False, **without):
        found["without the package"] = _text_of(synchronize)
    return found


def _text_of(call: Callable, *args: Any) -> Any:
    """Return what a call returns, or the name of its error."""
    try:
        return call(*args)
    except NotImplementedError:  # of the stub
        raise
    except (Exception, SystemExit) as error:
        return type(error).__name__


@compared("5.b", "who_am_i(rank, world_size)")
def _who_am_i(rank: int, world_size: int, who_am_i: Callable) -> dict:
    with patch.dict(os.environ, LOCAL_RANK=str(rank % 2 + 4)):
        return who_am_i(None, None)


@compared("5.c", "local_rank_of(arguments, environ)", sizes=(1,), where="for all launchers")
def _local_rank_of(rank: int, world_size: int, local_rank_of: Callable) -> dict:
    cases = [
        ([], {"LOCAL_RANK": "3"}),
        (["--local-rank=2"], {}),
        (["--local_rank=2"], {}),
        (["--local_rank", "1", "--epochs", "3"], {"RANK": "5"}),
        (["--epochs", "3"], {}),
        ([], {"RANK": "2", "LOCAL_RANK": "0"}),
    ]
    return {f"local_rank_of({a}, {e})": _text_of(local_rank_of, a, dict(e)) for a, e in cases}


_PAIRED = {thread: thread % 8 for thread in range(16)}  # two threads on each of 8 cores
# The sockets of the ranks' GPUs, the threads of each socket, and the core of each thread.
SERVERS = {
    "one socket": ([0, 0], [[0, 1, 2, 3]], {core: core for core in range(4)}),
    "two sockets": ([0, 0, 1, 1], [[0, 1, 2, 3], [4, 5, 6, 7]], {core: core for core in range(8)}),
    "two threads on a core": (
        [0, 1, 1, 0],
        [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
        _PAIRED,
    ),
    "cores that are left over": ([1, 0, 1, 1], [[0, 1, 2], [3, 4, 5, 6, 7]], _PAIRED),
    "more ranks than cores": ([0, 0, 0, 1], [[0, 1, 8, 9], [2, 3, 10, 11]], _PAIRED),
}


@compared(
    "5.3",
    "threads_of(local_rank, gpu_socket, sockets, core_of)",
    sizes=(1,),
    where="for 5 servers",
    kind="function",
)
def _threads_of(rank: int, world_size: int, threads_of: Callable) -> dict:
    return {
        f"local rank {local} with {name}": threads_of(local, list(where), sockets, dict(core_of))
        for name, (where, sockets, core_of) in SERVERS.items()
        for local in range(len(where))
    }
