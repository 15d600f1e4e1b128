"""Warm processes and the runs on them; the only home of processes and signals.

pool.py            WorkerPool, and `run` on the notebook's shared pool; `status` of both
torchrun.py        `kit.torchrun`: the same on processes that torchrun starts
arguments.py       what can be run, and on how many ranks
run_loop.py        one run: the only loop that waits for ranks, and its result or error
deadlock_watch.py  when a run is judged
result.py          what the ranks have reported: a `Result`, or the error if some failed
other_hosts.py     the same of ranks on other hosts
ranks.py           the ranks of a pool, and one rank's process: send to it, receive, end it
launchers.py       who starts the processes: spawn or mpiexec
live_view.py       what is shown while a run lasts, and printed after it
interrupts.py      when Ctrl-C and the notebook's stop button take effect
ipython.py         what IPython knows about the notebook's cells
private_folder.py  a pool's temporary folder
rank/              what runs in the process of a rank, and nowhere else
wire/              what travels between the two
"""

from ddp_kit.pool.interrupts import interruptible
from ddp_kit.pool.pool import (
    WorkerPool,
    check_world_size,
    keep_names,
    launcher_of,
    run,
    shutdown,
    status,
)
from ddp_kit.pool.ranks import end_all
from ddp_kit.pool.result import Result, last_failed_run
