"""Graders of lesson 05: what a rank knows from its environment, and where it should run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_kit.check.compared import alone, compared
from ddp_kit.check.grader import ended
from ddp_kit.error_text import count
from ddp_kit.errors import RankError

# Hosts, ranks on each, and GPUs or cores of each.
ON_GPUS = (
    *((1, 2, 2), (1, 3, 0), (2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 2, 4)),
    *((1, None, 2), (1, None, 0)),
)
ON_CORES = ((1, 2, 8), (2, 2, 8), (1, 3, 8), (1, 5, 4), (1, 1, 6), (1, None, 6))
ANY = (Exception, SystemExit)


def _where(case: tuple[int, int | None, int]) -> str:
    hosts, ranks, _ = case
    return "alone" if ranks is None else f"on {count(hosts, 'host')}"


def _called(call: str, hosts: int, ranks: int | None) -> str:
    """Return the call in a case, with `environ` for the braces unless the process is alone."""
    return f"{call.format('environ')}, {count(hosts, 'host')}" if ranks else call


@compared(
    "5.1",
    "place(environ, gpus)",
    where="on one host and on two, with and without GPUs, and alone",
    on_failure={RankError: "environ misread"},
    cases=[(hosts * (ranks or 1), hosts, ranks, gpus) for hosts, ranks, gpus in ON_GPUS],
    part=lambda case: _where(case[1:]),
    call=lambda n, hosts, ranks, gpus: _called(f"place({{}}, gpus={gpus})", hosts, ranks),
    spare=None,
)
def _place(rank: int, n: int, place: Callable, hosts: int, ranks: int | None, gpus: int) -> Any:
    return _as_strings(place(_environ(rank, n, ranks), gpus))


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


@compared(
    "5.2",
    "share_cores(environ, cores)",
    where="for 1 to 5 ranks on a host, on one host and on two, and alone",
    on_failure={RankError: "bad number"},
    cases=[(hosts * (ranks or 1), hosts, ranks, cores) for hosts, ranks, cores in ON_CORES],
    part=lambda case: _where(case[1:]),
    call=lambda n, hosts, ranks, cores: _called(f"share_cores({{}}, cores={cores})", hosts, ranks),
    spare=None,
)
def _share_cores(
    rank: int, n: int, share_cores: Callable, hosts: int, ranks: int | None, cores: int
) -> dict[str, int]:
    before = torch.get_num_threads()
    torch.set_num_threads(7)  # which is never right
    try:
        share_cores(_environ(rank, n, ranks), cores)
        return {"torch.get_num_threads()": torch.get_num_threads()}
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
        found["without a group"] = ended(synchronize, errors=ANY)
    without |= {"is_initialized": missing}
    with patch.multiple(dist, is_available=lambda: False, **without):
        found["without the package"] = ended(synchronize, errors=ANY)
    return found


@compared("5.b", "who_am_i(rank, world_size)")
def _who_am_i(rank: int, world_size: int, who_am_i: Callable) -> dict:
    own = {"RANK": rank + 10, "WORLD_SIZE": world_size + 20, "LOCAL_RANK": rank % 2 + 4}
    with patch.dict(os.environ, {name: str(number) for name, number in own.items()}):
        return who_am_i(None, None)


@alone("5.c", "local_rank_of(arguments, environ)", "for all launchers")
def _local_rank_of(local_rank_of: Callable) -> dict:
    cases = [
        ([], {"LOCAL_RANK": "3"}),
        (["--local-rank=0"], {"LOCAL_RANK": "3"}),
        (["--local-rank=2"], {}),
        (["--local-rank", "12"], {"LOCAL_RANK": "3"}),
        ([], {"RANK": "5"}),
        (["--local_rank=2"], {}),
        (["--local_rank", "1", "--epochs", "3"], {"RANK": "5"}),
        (["--epochs", "3"], {}),
        ([], {"RANK": "2", "LOCAL_RANK": "0"}),
    ]
    return {
        f"local_rank_of({a}, {e})": ended(local_rank_of, a, dict(e), errors=ANY) for a, e in cases
    }


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
    "threads that are not in order": (
        [1, 0, 0, 0],
        [[3, 1, 0, 2], [4, 5, 6, 7]],
        {thread: thread // 2 for thread in range(8)},
    ),
    "more ranks than cores": ([0, 0, 0, 1], [[0, 1, 8, 9], [2, 3, 10, 11]], _PAIRED),
}


@alone(
    "5.3", "threads_of(local_rank, gpu_socket, sockets, core_of)", "for 6 servers", kind="function"
)
def _threads_of(threads_of: Callable) -> dict:
    return {
        f"local rank {local} with {name}": threads_of(local, list(where), sockets, dict(core_of))
        for name, (where, sockets, core_of) in SERVERS.items()
        for local in range(len(where))
    }
