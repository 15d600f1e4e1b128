"""Ranks that start when a notebook imports the kit, so that its first run finds them warm."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ddp_kit.pool import ipython
from ddp_kit.pool.pool import start_shared_pool

MEMORY = 2 << 30  # bytes that must be available
CONTROL_GROUP = Path("/sys/fs/cgroup")  # where a container's limit is


def available_memory() -> int:
    """Return how many bytes processes may still use, on this machine and in this container."""
    import psutil

    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no control group, or one without a limit
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        used -= int(dict(map(str.split, lines))["inactive_file"])  # of the cache, which gives way
        available = min(available, limit - used)
    return available


def start_after_cell() -> None:
    """Start the shared pool when the cell that runs now has ended.

    Do nothing if DDP_KIT_WARM is 0, if too little memory is available, or if the cell has already
    started ranks, as a lesson under `%run` may.
    """

    def start() -> None:
        if available_memory() >= MEMORY:
            start_shared_pool()

    if os.environ.get("DDP_KIT_WARM") != "0":
        ipython.after_cell(start)
