"""Where torchrun has put this process: its rank, and the store in which the ranks meet."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from ddp_kit.errors import PoolError
from ddp_kit.pool.cells import shell

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT = timedelta(minutes=5)  # for ranks to come, and for each of their collectives

_groups = count()  # that this process has joined


class Place(NamedTuple):
    """A rank's place in the world, and on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int


def started_by_torchrun() -> bool:
    """Tell whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def started_by_hand() -> bool:
    """Tell whether somebody has set what torchrun would. A notebook is no rank, whatever is set."""
    return shell() is None and bool({"RANK", "WORLD_SIZE"} & os.environ.keys())


def read_place() -> Place:
    """Return what torchrun told this process. Raises PoolError if that is incomplete or wrong."""
    missing = [name for name in NAMES if name not in os.environ]
    if missing:
        raise PoolError(
            f"the environment of this rank lacks {', '.join(missing)}; start it with torchrun, "
            "which sets them"
        )
    around = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]} | os.environ
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not around[name].isdecimal():
            raise PoolError(f"{name} must be a whole number, and it is {around[name]!r}")
        numbers[name] = int(around[name])
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[name] >= numbers[limit]:
            raise PoolError(
                f"{name} is {numbers[name]} and {limit} is {numbers[limit]}: "
                f"{name} must be one of 0 to {numbers[limit] - 1}"
            )
    return Place(*numbers.values())


def attempt() -> int:
    """Return how often torchrun has started all ranks again; 0: this is the first start."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@functools.cache
def store() -> dist.Store:
    """Connect to the store in which the ranks meet; once, because a rank may hold it.

    Raises PoolError where they do not meet.
    """
    try:
        found, *_ = next(iter(dist.rendezvous("env://", timeout=JOIN_TIMEOUT)))
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = str(error).splitlines()[0].rstrip(".")
        raise PoolError(
            f"the ranks did not meet at {address} within {JOIN_TIMEOUT.seconds} s ({why}); that "
            "must be an address of rank 0's host which the other hosts can reach, and each host "
            "must have been started"
        ) from error
    return found


def join(backend: str, timeout: timedelta = JOIN_TIMEOUT) -> None:
    """Form the process group of all ranks. backend: as PyTorch names it. Raises as `store`.

    The store keeps the addresses of every group that was, also of one before a restart. So each
    group has keys of its own.
    """
    rank, world_size, *_ = read_place()
    keys = dist.PrefixStore(f"ddp_kit {attempt()} {next(_groups)}", store())
    if keys.add(f"rank {rank} came", 1) > 1:
        raise PoolError(
            f"two processes say that they are rank {rank}; give each host a --node-rank of its own"
        )
    place = {"rank": rank, "world_size": world_size, "timeout": timeout}
    dist.init_process_group(backend, store=keys, **place)
