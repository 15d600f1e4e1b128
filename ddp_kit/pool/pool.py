"""A pool of warm processes, and the runs of workers on them: the notebook's side.

     cell ── worker, args ──▶ WorkerPool ── cloudpickle bytes, one pipe a rank ──▶ rank.server
                                │  ▲                                                   │
      view ◀── a line a rank ───┤  ├──── what it printed (fd 1 and 2) ─────────────────┤
    result ◀────────────────────┘  └──── what it returned, sent or raised ─────────────┘

One thread, the cell's own, does all of this process's work (`run_loop.py`). There is no queue, lock
or named memory that a killed kernel could leave behind.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from ddp_kit import settings
from ddp_kit.backends import ON_GPUS, choose_backend
from ddp_kit.error_text import count
from ddp_kit.errors import PoolError
from ddp_kit.pool import arguments, ipython
from ddp_kit.pool.arguments import available_memory, explaining_arguments, prepare
from ddp_kit.pool.interrupts import holding_interrupt, show_interrupt
from ddp_kit.pool.launchers import MPIExec, Spawn
from ddp_kit.pool.private_folder import PrivateFolder, sweep
from ddp_kit.pool.ranks import RankHandle, RankProcesses, start_variables
from ddp_kit.pool.result import Result
from ddp_kit.pool.run_loop import Run
from ddp_kit.pool.wire.pickling import Payload
from ddp_kit.trace import IMPORTING


class WorkerPool:
    """Warm processes that run workers as the ranks of a process group.

    world_size: number of ranks to start; they import torch in the background.
    backend: "auto" (nccl if every rank can have a GPU of its own, else gloo), "gloo", "nccl",
        "cuda:gloo" for gloo on GPUs that ranks share, "mpi", whose ranks mpiexec
        starts, or "shm", shared memory.
    init: False leaves it to the worker to call `init_process_group`. Groups that it leaves are
        destroyed after the run.

    Before anything starts, raises PoolError if world_size is below 1 or more than memory and limits
    of this system allow, and BackendError if this machine lacks what the backend needs. `run`
    raises PoolError if the pool is closed or already running.

        with kit.WorkerPool(4) as pool:
            result = pool.run(worker)
    """

    _started_early = False  # before anybody asked for it

    @explaining_arguments("kit.WorkerPool(4)")
    def __init__(
        self, world_size: int = settings.WORLD_SIZE, backend: str = "auto", init: bool = True
    ) -> None:
        world_size = arguments.check_world_size(world_size, living=0)
        self._backend = choose_backend(backend, world_size)
        self._asked_backend = backend
        self._world_size = world_size
        folder = PrivateFolder()
        launcher = MPIExec(folder) if self._backend == "mpi" else Spawn()
        self._processes = RankProcesses(launcher, folder, init)
        self._runs = 0
        self._running = False
        self._closed = False
        self._owner = os.getpid()
        _all[next(_made)] = self
        try:
            with holding_interrupt():
                sweep()
                self._start()
        except BaseException as error:
            self.close()
            if isinstance(error, KeyboardInterrupt):
                show_interrupt(error, [])
            raise

    def _start(self) -> None:
        # An idle pool uses no memory of a GPU: the first run forms that group. It also forms that
        # of ranks that were started early: a kernel without a run has no file to leave behind.
        join = self._backend not in ON_GPUS and not self._started_early
        self._processes.form(self._world_size, self._backend, join)
        _look_later(settings.UNUSED_RANKS_END_AFTER)

    @explaining_arguments("pool.run(worker, *args, world_size=4)")
    def run(
        self,
        worker: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Call `worker(rank, world_size, *args)` on every rank and return what came back.

        world_size: number of ranks in this run, by default the pool's. Fewer re-form the group on
            the warm processes; more start the missing ones.
        timeout: seconds for the worker to return on every rank; None: no limit.

        Random numbers are drawn as by `kit.run`, which also says what is raised. The pool stays
        usable.
        """
        size = self._world_size if world_size is None else world_size
        self._check_usable()
        living = len(self._processes.ranks)
        size, backend, packed = prepare(worker, args, size, self._asked_backend, timeout, living)
        return self._run(packed, size, backend, timeout)

    def _check_usable(self) -> None:
        if self._closed:
            raise PoolError("this pool is closed; create a new WorkerPool")
        if self._owner != os.getpid():
            raise PoolError(
                "this pool belongs to the process that was forked; create a new WorkerPool here"
            )

    def _run(self, packed: Payload, world_size: int, backend: str, timeout: float | None) -> Result:
        if self._running:
            raise PoolError("this pool is already in a run; wait for it, or interrupt it")
        self._running = True
        self._runs += 1
        try:
            run = Run(self._processes, world_size, self._runs)
            return run.execute(packed, backend, timeout)
        finally:
            self._running = False
            _look_later(settings.UNUSED_RANKS_END_AFTER)

    def restart(self) -> None:
        """End every process and start fresh ones."""
        self._check_usable()
        try:
            with holding_interrupt():
                self._processes.end()
                self._start()
        except KeyboardInterrupt as interrupt:
            show_interrupt(interrupt, [])
            raise

    def close(self) -> None:
        """End every process and remove the pool's folder. A second call does nothing."""
        if self._closed or os.getpid() != self._owner:  # a forked child only has copies
            return
        in_main_thread = threading.current_thread() is threading.main_thread()
        with holding_interrupt() if in_main_thread else nullcontext():
            self._closed = True
            self._processes.end(remove=True)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_owner"):  # else it could not be created
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._running else "ready"
        ranks = len(self._processes.ranks) or self._world_size
        return f"WorkerPool({ranks} ranks, {self._processes.backend or self._backend}, {state})"


_all: weakref.WeakValueDictionary[int, WorkerPool] = weakref.WeakValueDictionary()  # as made
_made = itertools.count()
_looks_in: object = None  # the event loop that will look for unused ranks


@atexit.register
def _close_all() -> None:
    for pool in list(_all.values()):
        pool.close()


def _look_later(seconds: float) -> None:
    """Look for unused ranks after some minutes, if this thread has an event loop.

    A notebook's kernel has one, which calls between two cells, so never in a run.
    """
    global _looks_in
    if "asyncio" in sys.modules:
        with suppress(RuntimeError):  # there is no loop
            loop = sys.modules["asyncio"].get_running_loop()
            if _looks_in is not loop:  # an earlier one may have been closed
                loop.call_later(seconds, _end_unused)
                _looks_in = loop


def _end_unused() -> None:
    global _looks_in
    _looks_in, again = None, []
    for pool in list(_all.values()):
        if pool._running:
            again.append(settings.UNUSED_RANKS_END_AFTER)
        elif not pool._closed and pool._owner == os.getpid() and pool._processes.ranks:
            with suppress(KeyboardInterrupt), holding_interrupt():
                again.append(pool._processes.end_unused(settings.UNUSED_RANKS_END_AFTER))
    if seconds := list(filter(None, again)):
        _look_later(min(seconds))


class _EarlyPool(WorkerPool):
    _started_early = True


_shared: dict[str, WorkerPool] = {}  # by launcher


def launcher_of(backend: str) -> str:
    """Return which launcher starts a backend's ranks. Each launcher has its own processes."""
    return "mpiexec" if backend == "mpi" else "spawn"


@explaining_arguments("kit.run(worker, *args, world_size=4)")
def run(
    worker: Callable[..., Any],
    *args: Any,
    world_size: int = settings.WORLD_SIZE,
    backend: str = "auto",
    timeout: float | None = None,
) -> Result:
    """Call `worker(rank, world_size, *args)` on every rank of the notebook's shared pool.

    world_size: number of ranks. backend: "auto", "gloo", "nccl", "cuda:gloo", "mpi"
        or "shm".
    timeout: seconds for the worker to return on every rank; None: no limit.

    The first call starts the processes, unless they have been started in the background since the
    kit was imported in a notebook. They stay warm for the next call. In a notebook, they end when
    no run has used them for ten minutes, unless they hold names of `%%ranks`, and the next call
    starts new ones.

    Unless the worker sets a seed, as `torch.manual_seed(0)` does, torch draws different random
    numbers on each rank, and the same ones in every run on the same process. Python's `random` and
    NumPy draw new ones in every run.

    Raises PoolError or BackendError, before anything starts, for what cannot be run; RankError if
    ranks raised, RankDiedError if a process ended, DeadlockError if ranks wait for each other
    forever, MismatchError if they do not agree, RunTimeoutError after `timeout`.
    The next run works in any case.
    """
    world_size, chosen, packed = prepare(
        worker, args, world_size, backend, timeout, living_ranks(backend)
    )
    launcher = launcher_of(chosen)
    pool = _shared.get(launcher)
    if pool is None or pool._closed or pool._owner != os.getpid():
        pool = _shared[launcher] = WorkerPool(world_size, backend)
    elif _is_outdated(pool):
        pool.restart()
    return pool._run(packed, world_size, chosen, timeout)


def living_ranks(backend: str = "auto") -> int:
    """Return how many ranks `run` has already for a backend, which it need not start."""
    pool = _shared.get(launcher_of(backend))
    return len(pool._processes.ranks) if pool else 0


def check_world_size(world_size: int) -> int:
    """Return it as an int. Raise PoolError unless `run` can have that many ranks."""
    return arguments.check_world_size(world_size, living_ranks())


def shutdown() -> None:
    """End the ranks of the shared pools, which otherwise stay until this process ends.

    That frees their memory, about 150 MB for each rank; `status` says how much. The next `run`
    starts new ones. Do nothing if there are none.

    Raises PoolError in a run, which must end first.
    """
    if any(pool._running for pool in _shared.values()):
        raise PoolError("a run is still going on; wait for it, or interrupt it")
    while _shared:
        _shared.popitem()[1].close()


def keep_names(launcher: str, keep: bool = True) -> bool:
    """Keep the ranks of a shared pool when they are unused: they hold names of `%%ranks` cells.

    keep: False if they are to hold none any longer. Return whether there are any ranks.
    """
    if launcher not in _shared or not _shared[launcher]._processes.ranks:
        return False
    _shared[launcher]._processes.has_names = keep
    return True


def _is_outdated(pool: WorkerPool) -> bool:
    """Return whether ranks that were started early are unused, and their variables have changed."""
    processes = pool._processes
    if not pool._started_early or processes.is_used:
        return False
    now = start_variables()
    return any(rank.variables != now for rank in processes.ranks)


def start_after_cell() -> None:
    """Start the shared pool when the cell that runs now has ended: the first `run` finds it warm.

    Do nothing if DDP_KIT_WARM is 0, if too little memory is available, or if this process has
    started ranks already, as a lesson under `%run` may; nor if they cannot be started: `run` will
    say why.
    """

    def start() -> None:
        if available_memory() < settings.WARM_START_MEMORY or RankProcesses.ever_created:
            return
        with suppress(Exception, KeyboardInterrupt):  # it happens beside what the learner does
            _shared["spawn"] = _EarlyPool()

    if os.environ.get("DDP_KIT_WARM") != "0":
        ipython.after_cell(start)


# --- status ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessStatus:
    """The process of one rank.

    state: "starting", "idle", "running" or "ended". memory: bytes that only this process uses (its
    USS), and that its end would free; None: unknown.
    """

    rank: int
    state: str
    memory: int | None
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.state}{_megabytes(self.memory or 0)}"


@dataclass(frozen=True)
class PoolStatus:
    """One pool. shared: `kit.run` uses it. running: a run is going on.

    has_names: its ranks stay although nothing runs, because they hold names of `%%ranks` cells.
    """

    shared: bool
    backend: str
    running: bool
    ranks: tuple[ProcessStatus, ...]
    has_names: bool = False

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
        kept = ", kept for their names of %%ranks cells" if self.has_names else ""
        return "\n  ".join([f"{first}{_megabytes(self.memory)}{kept}", *map(str, self.ranks)])


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
    shared = list(_shared.values())
    pools = sorted(_all.values(), key=lambda one: one not in shared)
    there = [one for one in pools if not one._closed and one._owner == os.getpid()]
    return Status(tuple(_look_at(one, one in shared) for one in there))


def _look_at(one: WorkerPool, shared: bool) -> PoolStatus:
    processes = one._processes
    ranks = enumerate(list(processes.ranks))
    found = tuple(_look_at_rank(number, rank, one._running) for number, rank in ranks)
    backend = processes.backend or one._backend
    return PoolStatus(shared, backend, one._running, found, processes.has_names)


def _look_at_rank(number: int, rank: RankHandle, running: bool) -> ProcessStatus:
    state, memory = "ended", None
    with suppress(OSError, ValueError):  # it was just stopped, and what it had is closed
        if rank.alive:
            with suppress(psutil.Error, AttributeError):  # the system does not say
                memory = rank.psutil.memory_full_info().uss
            busy = rank.board.phase() == IMPORTING or (rank.owed and not running)
            state = "starting" if busy else "running" if rank.owed else "idle"
    return ProcessStatus(number, state, memory, rank.process.pid)


def _megabytes(number: int) -> str:
    return f", {number / 1e6:,.0f} MB" if number else ""
