"""A pool of warm processes, and the runs of workers on them. The parent side.

     cell ── worker, args ──▶ WorkerPool ── cloudpickle bytes, one pipe a rank ──▶ worker.main
                                │  ▲                                                   │
      view ◀── newest lines ────┤  ├──── what it printed (fd 1 and 2) ─────────────────┤
    result ◀────────────────────┘  └──── what it returned, sent or raised ─────────────┘

One thread, the cell's own, does all of the parent's work. It waits on the pipes and on the
processes' sentinels. There is no queue, lock or named memory that a killed kernel could leave.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from ddp_kit.backends import choose_backend
from ddp_kit.errors import KitError, PoolError
from ddp_kit.failures import name_ranks
from ddp_kit.pool import cells, modules, view
from ddp_kit.pool.folder import PrivateFolder, sweep
from ddp_kit.pool.interrupts import holding_interrupt, show_interrupt
from ddp_kit.pool.messages import Form, Run, Surroundings
from ddp_kit.pool.outcome import START_TIMEOUT, Outcome
from ddp_kit.pool.process import RankProcess
from ddp_kit.pool.request import check_world_size, look_around, prepare
from ddp_kit.pool.result import Result, print_output
from ddp_kit.pool.starters import MPIExec, Spawn
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
        self._init = init
        self._ranks: list[RankProcess] = []
        self._formed: tuple[int, str] | None = None  # the group that the ranks were told to form
        self._groups = self._runs = 0
        self._running = False
        self._closed = False
        self._told_of_gpu = False
        self._in_job = False  # a worker was sent; a rank that still owes a reply may be in it
        self._folder: PrivateFolder | None = None
        self._starter: Spawn | MPIExec | None = None
        self._owner = os.getpid()
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        try:
            with holding_interrupt():
                sweep()
                self._folder = PrivateFolder()
                self._starter = MPIExec(self._folder) if self._backend == "mpi" else Spawn()
                _pools.add(self)
                atexit.register(self._at_exit)
                self._form(world_size, self._backend)
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
        where_ranks_were: Callable[[], list[str]] = list
        try:
            around = look_around()
            self._end_old_code(world_size)
            with holding_interrupt():
                self._form(world_size, backend)
            if len(self._ranks) < world_size:  # mpiexec takes its time
                assert self._starter is not None, "it is there before the ranks are"
                self._starter.wait()
                with holding_interrupt():
                    self._form(world_size, backend)
                if len(self._ranks) < world_size:
                    raise PoolError("mpiexec ended while its processes became ranks; try again")
            shown = view.open_view(world_size)
            outcome = Outcome(self._ranks, shown)
            try:
                if outcome.collect(START_TIMEOUT):  # the replies to Form, of whoever owes one
                    self._runs += 1
                    outcome = Outcome(self._ranks[:world_size], shown, self._runs)
                    self._send_job(outcome.ranks, parcel, around)
                    outcome.collect(timeout)
            finally:
                with holding_interrupt():
                    output = outcome.close()
                    where_ranks_were, self._in_job = outcome.told, False
                    if not outcome.group_intact or outcome.threads:
                        self._formed = None
                        with suppress(KitError):  # the next run tries again, and tells it
                            self._form(world_size, backend)  # ready while the learner reads
                print_output(output)
            self._tell(outcome)
            return outcome.result(output)
        except KeyboardInterrupt as interrupt:
            show_interrupt(interrupt, where_ranks_were())
            raise
        finally:
            self._running = False

    def _end_old_code(self, world_size: int) -> None:
        """End the ranks that have imported a file which was changed since."""
        files = modules.changed([rank.modules for rank in self._ranks[:world_size]])
        old = [number for number, changed in enumerate(files) if changed]
        if old:
            with holding_interrupt():
                for number in old:
                    self._ranks[number].stop()
            names = " and ".join(sorted({os.path.basename(file) for file in set().union(*files)}))
            print(f"{names} changed on disk: starting {name_ranks(old)} afresh")

    def _tell(self, outcome: Outcome) -> None:
        """Say what happened on the side, and would surprise a learner who was not told."""
        for rank, thread in outcome.threads.items():
            print(f"rank {rank} starts afresh: the worker left its thread {thread!r} running")
        for line in outcome.tell_unawaited():
            print(line)
        if outcome.from_gpu and not self._told_of_gpu:
            self._told_of_gpu = True
            print("tensors that ranks returned from a GPU are on the CPU here")

    def restart(self) -> None:
        """End every process and start fresh ones."""
        if self._closed:
            raise PoolError("this pool is closed; make a new WorkerPool")
        with holding_interrupt():
            self._end_ranks()
            self._form(self._world_size, self._backend)

    def close(self) -> None:
        """End every process and remove the pool's folder. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:  # a forked child only has copies
            return
        in_main_thread = threading.current_thread() is threading.main_thread()
        with holding_interrupt() if in_main_thread else nullcontext():
            self._closed = True
            try:
                self._end_ranks()
            finally:
                if self._folder is not None:
                    self._folder.remove()
                atexit.unregister(self._at_exit)

    def _form(self, world_size: int, backend: str) -> None:
        """Have `world_size` living processes in one group, at the price of what is missing.

        What mpiexec has not started yet is left to the next call.
        """
        if _leaving:
            return
        broken = self._in_job or not all(rank.alive for rank in self._ranks)
        if broken:
            self._formed, self._in_job = None, False
        assert self._starter is not None, "it is there before the ranks are"
        if self._starter.provide(self._ranks, world_size, broken):
            self._formed = None
        if self._formed == (world_size, backend) or len(self._ranks) < world_size:
            return
        self._groups += 1
        assert self._folder is not None, "the folder is made before the ranks are"
        store = self._folder.store(self._groups) if self._init else None
        for number, rank in enumerate(self._ranks[:world_size]):
            rank.send(Form(number, world_size, backend, store))
        self._formed = (world_size, backend)

    def _send_job(self, ranks: list[RankProcess], parcel: Parcel, around: Surroundings) -> None:
        sources = cells.cell_sources()
        self._in_job = True
        for rank in ranks:
            rank.drain_output()
            rank.take_output()  # what came between two runs belongs to none
            new = {name: text for name, text in sources.items() if name not in rank.cells_seen}
            surroundings = None if around == rank.surroundings else around
            rank.send(Run(parcel, new, surroundings, self._runs))
            rank.cells_seen |= new.keys()
            rank.surroundings = around
        parcel.close()

    def _end_ranks(self) -> None:
        ranks, self._ranks, self._formed = self._ranks, [], None
        for rank in ranks:
            rank.dismiss()  # all at once: they leave side by side
        deadline = time.monotonic() + 1.0
        for rank in ranks:
            # One that owes a reply is busy, or has not even started: nothing to wait for.
            rank.stop(patience=0.0 if rank.owed else max(0.0, deadline - time.monotonic()))
        if self._starter is not None:
            self._starter.end()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_folder", None) is not None:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._running else "ready"
        backend = self._formed[1] if self._formed else self._backend
        return f"WorkerPool({len(self._ranks) or self._world_size} ranks, {backend}, {state})"


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_leaving = False  # the notebook's kernel is about to end


def leave(leaving: bool) -> None:
    """End the ranks of every pool, because this process is about to end; False: it stays.

    A kernel that shuts down sends its children SIGTERM and waits until they are reaped, which
    nobody would do: its main thread is idle, or in the middle of a run. Called in any thread.
    """
    global _leaving
    _leaving = leaving
    pools = list(_pools) if leaving else []
    ranks = [rank for pool in pools for rank in list(pool._ranks)]
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join(1)
    for pool in pools:
        if pool._starter is not None:
            pool._starter.end()


def _close_if_alive(reference: weakref.ref) -> None:
    pool = reference()
    if pool is not None:
        pool.close()


_shared: dict[str, WorkerPool] = {}  # by who starts the ranks: "spawn", "mpiexec"


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
    starter = "mpiexec" if chosen == "mpi" else "spawn"
    pool = _shared.get(starter)
    if pool is None or pool._closed:
        pool = _shared[starter] = WorkerPool(world_size, backend)
    return pool._run(parcel, world_size, chosen, timeout)
