"""What torchrun has set for this process: its rank, and the store; and the clock of its host."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_kit import settings, torch_internals
from ddp_kit.backends import device
from ddp_kit.errors import PoolError
from ddp_kit.pool.ipython import shell
from ddp_kit.pool.rank.bootstrap import end_with_parent
from ddp_kit.pool.wire.torchrun_store import connect
from ddp_kit.trace import Clock

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ROUNDS = 20  # questions for the time that one rank of each host asks

_groups = count()  # that this process has joined


class RankInfo(NamedTuple):
    """A rank's number in the world and on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def started_by_hand() -> bool:
    """Return whether torchrun's variables were set by hand. A notebook is never a rank."""
    return shell() is None and bool({"RANK", "WORLD_SIZE"} & os.environ.keys())


def end_with_agent() -> None:
    """Make this process end together with the torchrun agent that started it, if there is one."""
    if started_by_torchrun():
        end_with_parent()


def rank_info() -> RankInfo:
    """Return what torchrun has set. Raise PoolError if that is incomplete or wrong."""
    missing = [name for name in NAMES if name not in os.environ]
    if missing:
        raise PoolError(
            f"the environment of this rank lacks {', '.join(missing)}; start it with torchrun, "
            "which sets them"
        )
    given = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]} | os.environ
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not given[name].isdecimal():
            raise PoolError(f"{name} must be a whole number, got {given[name]!r}")
        numbers[name] = int(given[name])
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[name] >= numbers[limit]:
            raise PoolError(
                f"{name} is {numbers[name]} and {limit} is {numbers[limit]}: "
                f"{name} must be one of 0 to {numbers[limit] - 1}"
            )
    return RankInfo(*numbers.values())


def attempt() -> int:
    """Return how often torchrun has restarted all ranks; 0: this is the first start."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@functools.cache
def store() -> dist.Store:
    """Return a connection to torchrun's store; only one, because a rank may host it.

    Raises PoolError if the ranks do not meet there.
    """
    try:
        limit = timedelta(seconds=settings.JOIN_TIMEOUT)
        found, *_ = next(iter(dist.rendezvous("env://", timeout=limit)))
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = str(error).splitlines()[0].rstrip(".")
        raise PoolError(
            f"the ranks did not meet at {address} within {settings.JOIN_TIMEOUT:g} s ({why}); that "
            "must be an address of rank 0's host that the other hosts can reach, and the ranks of "
            "every host must have been started"
        ) from error
    return found


def own_store() -> dist.Store:
    """Return another connection to torchrun's store, for keys that the notebook reads.

    Raises what PyTorch raises if there is no store.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return connect(address, port, settings.JOIN_TIMEOUT)


def join_group(backend: str, timeout: timedelta = timedelta(seconds=settings.JOIN_TIMEOUT)) -> None:
    """Join the process group of all ranks, and wait until they are connected. Raises as `store`.

    backend: as PyTorch names it.

    The store keeps the addresses of earlier groups, even from before a restart, so each group has
    keys of its own.
    """
    rank, world_size, *_ = rank_info()
    keys = dist.PrefixStore(f"ddp_kit {attempt()} {next(_groups)}", store())
    if keys.add(f"rank {rank} came", 1) > 1:
        raise PoolError(f"two processes have rank {rank}; give each host its own --node-rank")
    members = {"rank": rank, "world_size": world_size, "timeout": timeout}
    dist.init_process_group(backend, store=keys, **members)
    torch_internals.wait_until_connected(dist.group.WORLD)


def clock_name() -> str:
    """Return a string that two processes share only if they share a monotonic clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"  # a container may have its own
    except OSError:
        return platform.node()


def compare_clocks(own: str | None = None, now: Callable[[], int] = monotonic_ns) -> Clock | None:
    """Return this process's clock relative to rank 0's; None: it is the same clock.

    The processes of a host share its monotonic clock. Two hosts do not: their clocks start at
    different moments. One rank of each other host therefore asks rank 0 for the time repeatedly and
    uses the fastest answer. Rank 0 read its clock between question and answer, so the error of the
    offset is at most half of that round trip.

    Every rank must call this. own: the clock's name, looked up if None; now: reads the clock.
    """
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, own or clock_name())
    asking = {name: names.index(name) for name in names}  # the lowest rank of each host
    measured = None
    for rank in list(asking.values())[1:]:
        if dist.get_rank() == rank:
            measured = _ask(now)
        elif dist.get_rank() == 0:
            _answer(rank, now)
    clocks: list[Any] = [None] * len(names)
    dist.all_gather_object(clocks, measured)
    return clocks[asking[names[dist.get_rank()]]]


def _ask(now: Callable[[], int]) -> Clock:
    found = []
    moment = torch.zeros(1, dtype=torch.int64, device=device())
    for _ in range(ROUNDS):
        before = now()
        dist.send(moment, 0)
        dist.recv(moment, 0)
        answer, after = int(moment.item()), now()
        found.append(Clock(answer - (before + after) // 2, (after - before) // 2 + 1))
    return min(found, key=lambda clock: clock.error)


def _answer(rank: int, now: Callable[[], int]) -> None:
    moment = torch.zeros(1, dtype=torch.int64, device=device())
    for _ in range(ROUNDS):
        dist.recv(moment, rank)
        moment.item()  # on a GPU the message has arrived only now
        dist.send(moment.fill_(now()), rank)
