"""The clocks of the hosts on which torchrun has started ranks, compared with rank 0's.

The processes of a host share its monotonic clock. Two hosts do not: their clocks start at
different moments. One rank of each other host therefore asks rank 0 for the time repeatedly and
uses the fastest answer. Rank 0 read its clock between question and answer, so the error of the
offset is at most half of that round trip.
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
    """Return a string that two processes share only if they share a monotonic clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"  # a container may have its own
    except OSError:
        return platform.node()


def compare_clocks(own: str | None = None, now: Callable[[], int] = monotonic_ns) -> Clock | None:
    """Return this process's clock relative to rank 0's; None: it is the same clock.

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
