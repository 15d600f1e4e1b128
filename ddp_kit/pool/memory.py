"""How many ranks this machine has room for: free memory, and files that may be open."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from ddp_kit.errors import PoolError

FILES_A_RANK = 5  # control and print pipe, board, and two that multiprocessing holds
FILES_ELSEWHERE = 100  # what a notebook's kernel has open for itself, generously
RANK_MEMORY = 250e6  # bytes that a process uses once it has imported torch
CONTROL_GROUP = Path("/sys/fs/cgroup")  # where a container's limit is
CACHE = "inactive_file", "active_file"  # of what the group has read; it gives way to processes
NEVER_REFUSED = 4  # ranks, because a system can also swap
INSIST = "DDP_KIT_MAX_RANKS"  # the environment variable that overrules free memory


def available_memory() -> int:
    """Return how many bytes processes may still use, on this machine and in this container."""
    import psutil

    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no control group, or one without a limit
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        stat = dict(map(str.split, lines))
        used -= sum(int(stat[name]) for name in CACHE)
        available = min(available, limit - used)
    return available


def check_room(size: int, living: int) -> None:
    """Raise PoolError unless there is room for `size` ranks, of which `living` run already."""
    if size <= living:
        return
    if size > (most := ranks_by_files()):
        raise PoolError(
            f"world_size must be at most {most} here, because of the limit on open files, got "
            f"{size}; run `ulimit -n {FILES_ELSEWHERE + FILES_A_RANK * size}` before starting "
            "Jupyter"
        )
    if size > max(NEVER_REFUSED, most := ranks_by_memory(living)):
        raise PoolError(
            f"world_size must be at most {most} now, because a rank needs about "
            f"{RANK_MEMORY / 1e6:g} MB and {available_memory() / 1e9:.1f} GB are free, got {size}; "
            "call kit.shutdown() in other notebooks, or insist with "
            f"os.environ[{INSIST!r}] = '{size}'"
        )


def ranks_by_memory(living: int) -> int:
    """Return how many ranks fit into the memory that is free, with `living` that run already."""
    insisted = os.environ.get(INSIST, "")
    fitting = living + int(available_memory() / RANK_MEMORY)
    return max(1, fitting, int(insisted) if insisted.isdecimal() else 0)


def ranks_by_files(limit: int | None = None) -> int:
    """Return how many ranks a process can start that may have `limit` files open; None: this."""
    import resource

    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (limit - FILES_ELSEWHERE) // FILES_A_RANK)
