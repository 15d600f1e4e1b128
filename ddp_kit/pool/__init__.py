"""Warm processes and the runs on them; the only home of processes and signals.

pool.py          WorkerPool, and `run` on the notebook's shared pool
run.py           one run: the only loop that waits for ranks
status.py        what `kit.status` shows
reports.py       what the ranks of a run have reported, and the error if some failed
launchers.py     who starts the processes: spawn or mpiexec
torchrun.py      `kit.torchrun`, and the launcher that it uses
rank/            what runs in the process of a rank, and nowhere else
wire/            what travels between the two
"""

from ddp_kit.pool.interrupts import interruptible
from ddp_kit.pool.pool import (
    WorkerPool,
    check_world_size,
    keep_names,
    launcher_of,
    run,
    shutdown,
)
from ddp_kit.pool.rank_processes import end_all
from ddp_kit.pool.reports import FailedRun, last_failed_run
from ddp_kit.pool.result import Result
from ddp_kit.pool.status import status

__all__ = [
    "FailedRun",
    "Result",
    "WorkerPool",
    "check_world_size",
    "end_all",
    "interruptible",
    "keep_names",
    "last_failed_run",
    "launcher_of",
    "run",
    "shutdown",
    "status",
]
