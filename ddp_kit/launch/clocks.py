"""The clocks of the hosts on which torchrun has started ranks, compared with rank 0's.

The processes of a host share its monotonic clock. Two hosts do not: theirs count from
different moments. So one rank of each other host asks rank 0 for the time, again and again,
and believes the quickest answer. Rank 0 read its clock between question and answer, so the
offset is wrong by half of that time at the most.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.backends import device
from ddp_kit.trace import Clock

ROUNDS = 20


def clock_name() -> str:
    """Return what two processes have in common only if they share a monotonic clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"  # a container may have its own
    except OSError:
        return platform.node()


def compare_clocks(own: str | None = None, now: Callable[[], int] = monotonic_ns) -> Clock | None:
    """Return how this process's clock stands to rank 0's; None: it is the same clock.

    Every rank must call this. own: the name of the clock, found out if None; now: reads it.
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
        told, after = int(moment.item()), now()
        found.append(Clock(told - (before + after) // 2, (after - before) // 2 + 1))
    return min(found, key=lambda clock: clock.error)


def _answer(rank: int, now: Callable[[], int]) -> None:
    moment = torch.zeros(1, dtype=torch.int64, device=device())
    for _ in range(ROUNDS):
        dist.recv(moment, rank)
        moment.item()  # on a GPU the message has come only now
        dist.send(moment.fill_(now()), rank)
