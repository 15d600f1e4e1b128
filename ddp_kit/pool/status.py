"""`kit.status`: which pools there are, what their ranks are doing, and how much memory they use."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from ddp_kit.error_text import count
from ddp_kit.pool import pool
from ddp_kit.pool.ranks import RankHandle
from ddp_kit.trace import IMPORTING


@dataclass(frozen=True)
class ProcessStatus:
    """The process of one rank.

    state: "starting", "idle", "running" or "ended". memory: bytes that only this process uses (its
    USS), and that its end would free; None: unknown. has_names: it stays although nothing runs,
    because it holds names of `%%ranks` cells.
    """

    rank: int
    state: str
    memory: int | None
    pid: int
    has_names: bool = False

    def __str__(self) -> str:
        kept = ", kept for its names of %%ranks cells" if self.has_names else ""
        return f"rank {self.rank}: {self.state}{_megabytes(self.memory or 0)}{kept}"


@dataclass(frozen=True)
class PoolStatus:
    """One pool. shared: `kit.run` uses it. running: a run is going on."""

    shared: bool
    backend: str
    running: bool
    ranks: tuple[ProcessStatus, ...]

    @property
    def memory(self) -> int:
        """The bytes that its ranks use, as far as they are known."""
        return sum(rank.memory or 0 for rank in self.ranks)

    def __str__(self) -> str:
        name = "shared pool" if self.shared else "WorkerPool"
        if not self.ranks:
            return f"{name}: no ranks; the next run starts them"
        starting = any(rank.state == "starting" for rank in self.ranks)
        state = "running" if self.running else "starting" if starting else "ready"
        first = f"{name}: {count(len(self.ranks), 'rank')}, {self.backend}, {state}"
        return "\n  ".join([first + _megabytes(self.memory), *map(str, self.ranks)])


@dataclass(frozen=True)
class Status:
    """What `kit.status` has found. pools: the shared ones first, then others as they were made."""

    pools: tuple[PoolStatus, ...]

    @property
    def memory(self) -> int:
        """The bytes that all ranks use, as far as they are known."""
        return sum(one.memory for one in self.pools)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.pools)) or "no ranks are running; kit.run starts them"


def status() -> Status:
    """Return which pools this process has, what their ranks are doing, and their memory.

    The memory is what only the rank's process uses (USS), so that its end would free it. Pages that
    it shares with others, such as those of PyTorch's libraries, are left out. Raise no error,
    whatever state the ranks are in.
    """
    shared = {id(one): one for one in pool._shared.values()}
    everyone = shared | {id(one): one for one in list(pool._all.values())}
    return Status(
        tuple(_look_at(one, id(one) in shared) for one in everyone.values() if _is_open(one))
    )


def _is_open(one: pool.WorkerPool) -> bool:
    return not one._closed and one._owner == os.getpid()


def _look_at(one: pool.WorkerPool, shared: bool) -> PoolStatus:
    ranks = list(one._processes.ranks)
    backend = one._processes.backend or one._backend
    found = (_look_at_rank(number, rank, one._running) for number, rank in enumerate(ranks))
    return PoolStatus(shared, backend, one._running, tuple(found))


def _look_at_rank(number: int, rank: RankHandle, running: bool) -> ProcessStatus:
    state, memory = "ended", None
    with suppress(OSError, ValueError):  # it was just stopped, and what it had is closed
        if rank.alive:
            memory = _memory(rank)
            busy = rank.board.phase() == IMPORTING or (rank.owed and not running)
            state = "starting" if busy else "running" if rank.owed else "idle"
    return ProcessStatus(number, state, memory, rank.process.pid, rank.has_names)


def _memory(rank: RankHandle) -> int | None:
    """Return the bytes that only the process of a rank uses; None if the system does not say."""
    import psutil

    with suppress(psutil.Error, AttributeError):
        return rank.psutil.memory_full_info().uss
    return None


def _megabytes(number: int) -> str:
    return f", {number / 1e6:,.0f} MB" if number else ""
