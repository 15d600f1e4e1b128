"""One way to run workers, whoever started the ranks.

Spawned: the notebook's shared pool runs the worker on its processes, and this process, which
is none of the ranks, gets the result. Under torchrun: every process is a rank and runs its own
part; the parts are gathered, so that each process holds the same result.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_kit import backends, pool
from ddp_kit.errors import PoolError
from ddp_kit.pool.result import Result, print_output
from ddp_kit.trace import Trace, recording

TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOIN_TIMEOUT = timedelta(minutes=5)


class Ranks:
    """The ranks of a lesson; call it with a worker to run that worker on all of them."""

    def __init__(self, world_size: int, backend: str, rank: int | None = None) -> None:
        self.world_size = world_size
        self.backend = backend
        self._rank = rank  # None: the ranks are spawned, and this process is none of them

    def __str__(self) -> str:
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"

    def __call__(self, worker: Callable[..., Any], *args: Any) -> Result:
        """Run `worker(rank, world_size, *args)` on every rank; return the result."""
        if self._rank is None:
            return pool.run(worker, *args, world_size=self.world_size, backend=self.backend)
        printed = io.StringIO()
        with recording() as recorder, redirect_stdout(printed):
            value = worker(self._rank, self.world_size, *args)
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, (value, printed.getvalue(), tuple(recorder.sends)))
        values, output, sent = zip(*parts, strict=True)
        if self._rank == 0:
            print_output(output)
        trace = Trace(self.world_size, tuple(send for part in sent for send in part))
        return Result(values, output, trace)

    def say(self, line: str) -> None:
        """Print a line once, however many processes there are."""
        if self._rank in (None, 0):
            print(line)


@contextmanager
def open_ranks(world_size: int | None = None, backend: str = "auto") -> Iterator[Ranks]:
    """Give the ranks that torchrun started, or ranks of the shared pool.

    Raises PoolError for a world size that cannot be, and if torchrun's environment is
    incomplete or has another one; BackendError for a backend that cannot be had.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        size = 4 if world_size is None else world_size
        pool.check_world_size(size)
        backends.choose_backend(backend, size)
        yield Ranks(size, backend)
        return
    rank, started = _join_torchrun(world_size, backend)
    try:
        yield Ranks(started, backend, rank)
    finally:
        dist.destroy_process_group()


def _join_torchrun(world_size: int | None, backend: str) -> tuple[int, int]:
    missing = [name for name in TORCHRUN_NAMES if name not in os.environ]
    if missing:
        raise PoolError(f"torchrun's environment lacks {', '.join(missing)}; start with torchrun")
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size not in (None, started):
        raise PoolError(
            f"torchrun started {started} ranks, but --world-size is {world_size}; "
            "leave --world-size out, or set --nproc-per-node to it"
        )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", started))
    chosen = backends.choose_backend(backend, local_size)
    backends.share_cores(local_size)
    backends.take_device(chosen, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backends.for_group(chosen), timeout=JOIN_TIMEOUT)
    return rank, started
