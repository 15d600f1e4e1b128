"""A pool of warm processes, and the runs of workers on them. The parent side.

     cell ── worker, args ──▶ WorkerPool ── cloudpickle bytes, one pipe a rank ──▶ worker.main
                                │  ▲                                                   │
      view ◀── a line a rank ───┤  ├──── what it printed (fd 1 and 2) ─────────────────┤
    result ◀────────────────────┘  └──── what it returned, sent or raised ─────────────┘

One thread, the cell's own, does all of the parent's work. It waits on the pipes and on the
processes' sentinels. There is no queue, lock or named memory that a killed kernel could leave.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from ddp_kit.backends import choose_backend
from ddp_kit.errors import PoolError
from ddp_kit.pool import view
from ddp_kit.pool.crew import Crew
from ddp_kit.pool.folder import sweep
from ddp_kit.pool.interrupts import holding_interrupt, show_interrupt
from ddp_kit.pool.outcome import START_TIMEOUT, Outcome
from ddp_kit.pool.request import check_world_size, look_around, prepare
from ddp_kit.pool.result import Result, print_output
from ddp_kit.pool.starters import starter_of
from ddp_kit.pool.values import Parcel


class WorkerPool:
    """Warm processes that run workers as the ranks of a process group.

    world_size: how many ranks to start; they import torch in the background.
    backend: "auto" (nccl where every rank can have a GPU, else gloo), "gloo", "nccl",
        "cuda:gloo" for gloo on GPUs that ranks share, or "mpi", whose ranks mpiexec starts.
    init: False leaves it to the worker to call `init_process_group`. What it leaves of a group
        is taken away after the run.

    Raises PoolError or BackendError, before anything starts, if that cannot be.

        with kit.WorkerPool(4) as pool:
            result = pool.run(worker)
    """

    def __init__(self, world_size: int = 4, backend: str = "auto", init: bool = True) -> None:
        check_world_size(world_size)
        self._backend = choose_backend(backend, world_size)
        self._asked_backend = backend
        self._world_size = world_size
        self._crew: Crew | None = None
        self._runs = 0
        self._running = False
        self._closed = False
        self._told_of_gpu = False
        self._owner = os.getpid()
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        try:
            with holding_interrupt():
                sweep()
                self._crew = Crew(self._backend == "mpi", init)
                atexit.register(self._at_exit)
                self._crew.form(world_size, self._backend)
        except BaseException as error:
            self.close()
            if isinstance(error, KeyboardInterrupt):
                show_interrupt(error, [])
            raise

    def run(
        self,
        worker: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Call `worker(rank, world_size, *args)` on every rank and return what came back.

        world_size: ranks in this run, the pool's own number by default. Fewer re-forms the
            group on the warm processes; more starts the missing ones.
        timeout: seconds for the worker to return on every rank; None lets it last.

        Raises PoolError for what cannot be run or pickled, RankError if ranks raised,
        RankDiedError if a process ended, DeadlockError if ranks wait for each other for ever,
        MismatchError if they do not agree, RunTimeoutError after `timeout`. The pool stays usable.
        """
        size = self._world_size if world_size is None else world_size
        if self._closed:
            raise PoolError("this pool is closed; make a new WorkerPool")
        backend, parcel = prepare(worker, args, size, self._asked_backend, timeout)
        return self._run(parcel, size, backend, timeout)

    def _run(self, parcel: Parcel, world_size: int, backend: str, timeout: float | None) -> Result:
        if self._running:
            raise PoolError("this pool is in the middle of a run; wait for it, or interrupt it")
        self._running = True
        crew = self._crew
        assert crew is not None, "it is there since the pool is"
        where_ranks_were: Callable[[], list[str]] = list
        try:
            around = look_around()
            crew.end_old_code(world_size)
            crew.get_ready(world_size, backend)
            shown = view.open_view(world_size)
            outcome = Outcome(crew.ranks, shown)
            try:
                if outcome.collect(START_TIMEOUT):  # the replies to Form, of whoever owes one
                    self._runs += 1
                    outcome = Outcome(crew.ranks[:world_size], shown, self._runs)
                    crew.send_job(outcome.ranks, parcel, around, self._runs)
                    outcome.collect(timeout)
            finally:
                with holding_interrupt():
                    output = outcome.close()
                    where_ranks_were = outcome.told
                    crew.end_job(outcome.group_intact and not outcome.threads)
                print_output(output)
            self._tell(outcome)
            return outcome.result(output)
        except KeyboardInterrupt as interrupt:
            show_interrupt(interrupt, where_ranks_were())
            raise
        finally:
            self._running = False

    def _tell(self, outcome: Outcome) -> None:
        """Say what happened on the side, and would surprise a learner who was not told."""
        for rank, thread in outcome.threads.items():
            view.say(f"rank {rank} starts afresh: the worker left its thread {thread!r} running")
        for line in outcome.format_unawaited():
            view.say(line)
        if outcome.from_gpu and not self._told_of_gpu:
            self._told_of_gpu = True
            view.say("tensors that ranks returned from a GPU are on the CPU here")

    def restart(self) -> None:
        """End every process and start fresh ones."""
        if self._closed:
            raise PoolError("this pool is closed; make a new WorkerPool")
        assert self._crew is not None, "it is there since the pool is"
        with holding_interrupt():
            self._crew.end()
            self._crew.form(self._world_size, self._backend)

    def close(self) -> None:
        """End every process and remove the pool's folder. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:  # a forked child only has copies
            return
        in_main_thread = threading.current_thread() is threading.main_thread()
        with holding_interrupt() if in_main_thread else nullcontext():
            self._closed = True
            try:
                if self._crew is not None:
                    self._crew.end()
            finally:
                if self._crew is not None:
                    self._crew.folder.remove()
                atexit.unregister(self._at_exit)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_crew", None) is not None:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._running else "ready"
        ranks = len(self._crew.ranks) if self._crew else 0
        backend = (self._crew.backend if self._crew else None) or self._backend
        return f"WorkerPool({ranks or self._world_size} ranks, {backend}, {state})"


def _close_if_alive(reference: weakref.ref) -> None:
    pool = reference()
    if pool is not None:
        pool.close()


_shared: dict[str, WorkerPool] = {}  # by starter


def run(
    worker: Callable[..., Any],
    *args: Any,
    world_size: int = 4,
    backend: str = "auto",
    timeout: float | None = None,
) -> Result:
    """Call `worker(rank, world_size, *args)` on every rank of the notebook's shared pool.

    world_size: how many ranks. backend: "auto", "gloo", "nccl", "cuda:gloo" or "mpi".
    timeout: seconds, or None.

    The first call starts the processes; they stay warm for the next one.

    Raises PoolError or BackendError, before anything starts, for what cannot be run; RankError if
    ranks raised, RankDiedError if a process ended, DeadlockError if ranks wait for each other for
    ever, MismatchError if they do not agree, RunTimeoutError after `timeout`. The next run works.
    """
    chosen, parcel = prepare(worker, args, world_size, backend, timeout)
    starter = starter_of(chosen)
    pool = _shared.get(starter)
    if pool is None or pool._closed:
        pool = _shared[starter] = WorkerPool(world_size, backend)
    return pool._run(parcel, world_size, chosen, timeout)
