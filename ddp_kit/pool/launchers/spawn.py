"""Ranks that torch.multiprocessing.spawn starts, one by one."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import torch.multiprocessing as mp

from ddp_kit.pool.interrupts import holding_interrupt
from ddp_kit.pool.launchers.base import Launcher
from ddp_kit.pool.rank import bootstrap
from ddp_kit.pool.rank_handle import Ends, Process, RankHandle, stop_ranks
from ddp_kit.pool.wire.messages import RANK_MARK

FIRST = Path(bootstrap.__file__).with_name("without_gc.py")


class Spawn(Launcher):
    """Starts each process by itself, so that one can be replaced, added or left out."""

    separate = True

    def provide(self, ranks: list[RankHandle], world_size: int, broken: bool) -> bool:
        """Replace the broken processes and add the missing ones."""
        # One that owes a reply may wait for the dead one in the group they were to form, or run a
        # worker that a second interrupt has left behind.
        unusable = [n for n, rank in enumerate(ranks) if broken and (rank.owed or not rank.alive)]
        stop_ranks([ranks[number] for number in unusable])
        for number in unusable:
            ranks[number] = RankHandle(_spawn)
        new = bool(unusable) or len(ranks) < world_size
        while len(ranks) < world_size:
            ranks.append(RankHandle(_spawn))
        return new


def _spawn(ends: Ends) -> tuple[Process, Callable[[], None]]:
    with (
        holding_interrupt(),
        _main_module(FIRST),
        _no_resource_tracker(),
        _environment(RANK_MARK, ends.mark),
    ):
        args = ends.control, ends.printed, ends.board, os.getpid()
        started = mp.spawn(bootstrap.serve_spawned, args, nprocs=1, join=False)
    # torch writes these if `serve_spawned` fails.
    return started.processes[0], partial(_remove, getattr(started, "error_files", ()))


def _remove(files: Sequence[str]) -> None:
    for file in files:
        Path(file).unlink(missing_ok=True)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for the processes that are started in this block."""
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def _no_resource_tracker() -> Iterator[None]:
    """Start processes without multiprocessing's tracker of named memory, which is not used here.

    The tracker outlives SIGTERM, and a kernel that is shut down waits seconds for it, is then
    killed, and cannot clean up.
    """
    getfd = resource_tracker.getfd
    with open(os.devnull, "wb") as nowhere:
        resource_tracker.getfd = nowhere.fileno
        try:
            yield
        finally:
            resource_tracker.getfd = getfd


@contextmanager
def _main_module(file: Path) -> Iterator[None]:
    """Let spawn run `file` first in each rank, and not the notebook's script again."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__file__ = str(file)
    try:
        yield
    finally:
        sys.modules["__main__"] = before
