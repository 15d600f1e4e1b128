"""Warm processes and the runs on them; the only home of processes and signals."""

from ddp_kit.pool.crew import leave
from ddp_kit.pool.interrupts import interruptible
from ddp_kit.pool.pool import WorkerPool, run
from ddp_kit.pool.request import check_world_size
from ddp_kit.pool.result import Result

__all__ = ["Result", "WorkerPool", "check_world_size", "interruptible", "leave", "run"]
