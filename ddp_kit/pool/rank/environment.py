"""What torchrun has set for this process: its rank, and the store for the rendezvous."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from ddp_kit import torch_internals
from ddp_kit.errors import PoolError
from ddp_kit.pool.ipython import shell
from ddp_kit.pool.rank.bootstrap import end_with_parent
from ddp_kit.pool.wire.torchrun_store import connect

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT = timedelta(minutes=5)  # for ranks to join, and for each of their collectives

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
        found, *_ = next(iter(dist.rendezvous("env://", timeout=JOIN_TIMEOUT)))
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = str(error).splitlines()[0].rstrip(".")
        raise PoolError(
            f"the ranks did not meet at {address} within {JOIN_TIMEOUT.seconds} s ({why}); that "
            "must be an address of rank 0's host that the other hosts can reach, and the ranks of "
            "every host must have been started"
        ) from error
    return found


def own_store() -> dist.Store:
    """Return another connection to torchrun's store, for keys that the notebook reads.

    Raises what PyTorch raises if there is no store.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return connect(address, port, attempt(), JOIN_TIMEOUT)


def join_group(backend: str, timeout: timedelta = JOIN_TIMEOUT) -> None:
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
