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
import inspect
import math
import os
import pickle
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from ddp_kit.backends import choose_backend
from ddp_kit.errors import (
    PoolError,
    RankDiedError,
    RankError,
    RankFailure,
    RunTimeoutError,
)
from ddp_kit.pool import cells, view, worker
from ddp_kit.pool.messages import Form, Raised, Returned, Run
from ddp_kit.pool.process import RankProcess, holding_interrupt
from ddp_kit.pool.result import Result, print_output
from ddp_kit.trace import Trace

GRACE = 0.3  # seconds that the other ranks get to report, once one has failed
START_TIMEOUT = 300.0  # seconds for fresh processes to import torch and form a group
REFRESH = 0.1  # seconds between two looks at the live view
FOLDER = "ddp_kit-"  # how a pool's folder is called; the process id and a random part follow
RANK_MEMORY = 250e6  # bytes that a process needs which has imported torch


class WorkerPool:
    """Warm processes that run workers as the ranks of a process group.

    world_size: how many ranks to start; they import torch in the background.
    backend: "auto" (nccl where every rank can have a GPU, else gloo), "gloo" or "nccl".

    Raises PoolError or BackendError, before anything starts, if that cannot be.

        with kit.WorkerPool(4) as pool:
            result = pool.run(worker)
    """

    def __init__(self, world_size: int = 4, backend: str = "auto") -> None:
        check_world_size(world_size)
        self._backend = choose_backend(backend, world_size)
        self._asked_backend = backend
        self._world_size = world_size
        self._ranks: list[RankProcess] = []
        self._formed: tuple[int, str] | None = None  # the group that the ranks were told to form
        self._groups = 0
        self._running = False
        self._closed = False
        with holding_interrupt():
            sweep_folders()
            self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-")
            atexit.register(_close_if_alive, weakref.ref(self))
            self._form(world_size, self._backend)

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
        RankDiedError if a process ended, RunTimeoutError after `timeout`. The pool stays usable.
        """
        size = self._world_size if world_size is None else world_size
        check_world_size(size)
        return self._run(worker, args, size, choose_backend(self._asked_backend, size), timeout)

    def _run(
        self,
        worker: Callable[..., Any],
        args: tuple,
        world_size: int,
        backend: str,
        timeout: float | None,
    ) -> Result:
        if self._closed:
            raise PoolError("this pool is closed; make a new WorkerPool")
        if self._running:
            raise PoolError("this pool is in the middle of a run; wait for it, or interrupt it")
        check_timeout(timeout)
        check_signature(worker, args)
        payload = pack(worker, args)
        self._running = True
        try:
            with holding_interrupt():
                self._form(world_size, backend)
            ranks = self._ranks[:world_size]
            outcome = _Outcome(ranks, view.open_view(world_size))
            try:
                if outcome.collect(START_TIMEOUT):  # the replies to Form
                    self._send_job(ranks, payload)
                    outcome.collect(timeout)
            finally:
                with holding_interrupt():
                    output = outcome.close()
                    if not outcome.group_intact:
                        self._formed = None
                        self._form(world_size, backend)  # ready again while the learner reads
                print_output(output)
            return outcome.result(output)
        except KeyboardInterrupt as interrupt:
            raise interrupt.with_traceback(None) from None  # where the pool waited is no news
        finally:
            self._running = False

    def restart(self) -> None:
        """End every process and start fresh ones."""
        if self._closed:
            raise PoolError("this pool is closed; make a new WorkerPool")
        with holding_interrupt():
            self._end_ranks()
            self._form(self._world_size, self._backend)

    def close(self) -> None:
        """End every process and remove the pool's folder. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._end_ranks()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _form(self, world_size: int, backend: str) -> None:
        """Have `world_size` living processes in one group, at the price of what is missing."""
        for index, rank in enumerate(self._ranks):
            if not rank.alive:
                rank.stop()
                self._ranks[index] = RankProcess()
                self._formed = None
        while len(self._ranks) < world_size:
            self._ranks.append(RankProcess())
            self._formed = None
        if self._formed == (world_size, backend):
            return
        self._groups += 1
        store = os.path.join(self._folder, f"group-{self._groups}")
        for number, rank in enumerate(self._ranks[:world_size]):
            rank.send(Form(number, world_size, backend, store))
        self._formed = (world_size, backend)

    def _send_job(self, ranks: list[RankProcess], payload: bytes) -> None:
        sources = cells.cell_sources()
        for rank in ranks:
            rank.drain_output()
            rank.take_output()  # what came between two runs belongs to none
            new = {name: text for name, text in sources.items() if name not in rank.cells_seen}
            rank.cells_seen |= new.keys()
            rank.send(Run(payload, new, list(sys.path), os.getcwd()))

    def _end_ranks(self) -> None:
        ranks, self._ranks, self._formed = self._ranks, [], None
        for rank in ranks:
            rank.control.close()  # all at once: they leave side by side
        deadline = time.monotonic() + 1.0
        for rank in ranks:
            # One that owes a reply is busy, or has not even started: nothing to wait for.
            rank.stop(patience=0.0 if rank.owed else max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_folder", None):
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._running else "ready"
        return f"WorkerPool({len(self._ranks) or self._world_size} ranks, {self._backend}, {state})"


class _Outcome:
    """What the ranks of one run have said so far, and the wait for the rest."""

    def __init__(self, ranks: list[RankProcess], shown: view.View) -> None:
        self.ranks = ranks
        self._view = shown
        self._timeout = math.inf
        self._looked = time.monotonic()
        self._waiting: set[int] = set()
        self._returned: dict[int, Returned] = {}
        self._raised: dict[int, RankFailure] = {}
        self._died: dict[int, int] = {}
        self._timed_out: set[int] = set()

    @property
    def group_intact(self) -> bool:
        """Every rank returned, and left the process group as it was."""
        return len(self._returned) == len(self.ranks) and all(
            reply.group_intact for reply in self._returned.values()
        )

    def collect(self, timeout: float | None) -> bool:
        """Wait for every reply that is owed; False if a rank failed or the time is over."""
        self._timeout = math.inf if timeout is None else timeout
        deadline = time.monotonic() + self._timeout
        self._waiting = {number for number, rank in enumerate(self.ranks) if rank.owed}
        grace_ends = math.inf
        while self._waiting:
            self._wait(REFRESH)
            now = time.monotonic()
            if now - self._looked >= REFRESH:
                self._looked = now
                self._view.update([rank.newest_line() for rank in self.ranks])
            if self._raised or self._died:
                grace_ends = min(grace_ends, now + GRACE)
            elif now >= deadline:
                self._timed_out = set(self._waiting)
                return False
            if now >= grace_ends:
                break
        return not (self._raised or self._died)

    def _wait(self, seconds: float) -> None:
        handles: dict[Any, tuple[int, str]] = {}
        for number in self._waiting:
            rank = self.ranks[number]
            handles[rank.control] = (number, "reply")
            handles[rank.sentinel] = (number, "end")
            if rank.printing:
                handles[rank.printed] = (number, "output")
        ready = [handles[handle] for handle in connection.wait(list(handles), seconds)]
        for number, what in ready:
            if what == "output":
                self.ranks[number].read_output()
            elif what == "reply":
                self._take_reply(number)
        for number, what in ready:
            # A rank that replied and then ended has its reply in the pipe still.
            if what == "end" and number in self._waiting and not self.ranks[number].control.poll():
                self._note_death(number)

    def _take_reply(self, number: int) -> None:
        reply = self.ranks[number].receive()
        if reply is None:
            self._note_death(number)
        elif isinstance(reply, Returned):
            self._returned[number] = reply
            self._waiting.discard(number)
        elif isinstance(reply, Raised):
            self._raised[number] = reply.failure
            self._waiting.discard(number)
        elif not self.ranks[number].owed:  # Formed
            self._waiting.discard(number)

    def _note_death(self, number: int) -> None:
        process = self.ranks[number].process
        process.join(1)
        self._died[number] = process.exitcode if process.exitcode is not None else 0
        self._waiting.discard(number)

    def close(self) -> list[str]:
        """Stop the ranks that still owe a reply, and return what each rank has printed."""
        for rank in self.ranks:
            rank.drain_output()
            if rank.owed:
                rank.stop()
        self._view.close()
        return [rank.take_output() for rank in self.ranks]

    def result(self, output: list[str]) -> Result:
        """Return what the ranks returned, or raise what kept them from it."""
        if self._died:  # what the others raised is then mostly a lost connection
            rank = min(self._died)
            raise RankDiedError(rank, self._died[rank], set(self._died) - {rank})
        if self._raised:
            raise RankError(self._raised, cells.cell_names())
        if self._timed_out:
            raise RunTimeoutError(self._timeout, self._timed_out)
        sends = [send for _, reply in sorted(self._returned.items()) for send in reply.sends]
        values = (unpack(rank, self._returned[rank].value) for rank in range(len(self.ranks)))
        return Result(tuple(values), tuple(output), Trace(len(self.ranks), tuple(sends)))


def check_world_size(world_size: int) -> None:
    """Raise PoolError unless this machine can hold that many ranks."""
    if worker.serving:
        raise PoolError(
            "a rank cannot start ranks of its own; call kit.run from the notebook, or in a module "
            'below `if __name__ == "__main__":`'
        )
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise PoolError(f"world_size must be a whole number such as 4, got {world_size!r}")
    if world_size < 1:
        raise PoolError(f"world_size must be at least 1, got {world_size}")
    most = most_ranks()
    if world_size > most:
        raise PoolError(f"world_size must be at most {most} on this machine, got {world_size}")


def most_ranks() -> int:
    """Return how many ranks this machine's memory and open-file limit can hold."""
    import resource

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_files = (files - 100) // 4 if files != resource.RLIM_INFINITY else 1024
    return max(1, min(int(memory / RANK_MEMORY), by_files, 1024))


def check_timeout(timeout: float | None) -> None:
    """Raise PoolError unless `timeout` is None or a positive number of seconds."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise PoolError(f"timeout must be a positive number of seconds or None, got {timeout!r}")


def check_signature(worker: Callable[..., Any], args: tuple) -> None:
    """Raise PoolError unless `worker(rank, world_size, *args)` is a possible call."""
    name = getattr(worker, "__name__", None) or type(worker).__name__
    if not callable(worker):
        raise PoolError(f"the worker must be a function, got {worker!r}")
    try:
        signature = inspect.signature(worker)
    except (TypeError, ValueError):
        return  # some built-in callables do not tell
    try:
        signature.bind(0, 1, *args)
    except TypeError:
        extra = f" and then the {len(args)} you passed" if args else ""
        raise PoolError(
            f"{name}{signature} cannot be a worker here: it is called with two arguments, "
            f"rank and world_size{extra}"
        ) from None


def pack(worker: Callable[..., Any], args: tuple) -> bytes:
    """Pickle worker and arguments; raise PoolError naming what cannot be pickled."""
    try:
        with _without_import(sys.modules.get(getattr(worker, "__module__", None) or "")):
            return cloudpickle.dumps((worker, args))
    except Exception:
        pass
    for what, value in [(f"argument {i}", arg) for i, arg in enumerate(args)] + [
        ("the worker, or something that it uses,", worker)
    ]:
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise PoolError(
                f"{what} cannot be sent to the ranks: {type(value).__name__} ({error}); "
                "make it inside the worker, or pass numbers, tensors, lists or dicts"
            ) from None
    raise PoolError("worker and arguments cannot be sent to the ranks together")


@contextmanager
def _without_import(module: ModuleType | None) -> Iterator[None]:
    """Have a module's functions pickled by value if a rank would run it instead of importing it.

    `%run -n script.py` leaves such a module: it has a name, but was never imported.
    """
    if module is None or module.__name__ == "__main__" or getattr(module, "__spec__", None):
        yield  # cloudpickle knows what to do
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def unpack(rank: int, data: bytes) -> Any:
    """Unpickle what a rank returned; raise PoolError if the notebook cannot hold it."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise PoolError(
            f"what rank {rank} returned cannot be rebuilt in the notebook: "
            f"{type(error).__name__}: {error}; return tensors, numbers, lists or dicts"
        ) from None


def sweep_folders() -> None:
    """Remove the folders of this user's pools whose process is gone, killed or shut down."""
    import psutil

    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        owner = folder.name.removeprefix(FOLDER).split("-")[0]
        try:
            ours = folder.is_dir() and folder.lstat().st_uid == os.getuid()
        except OSError:
            continue  # another pool was quicker
        if ours and owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _close_if_alive(reference: weakref.ref) -> None:
    pool = reference()
    if pool is not None:
        pool.close()


_shared: WorkerPool | None = None


def run(
    worker: Callable[..., Any],
    *args: Any,
    world_size: int = 4,
    backend: str = "auto",
    timeout: float | None = None,
) -> Result:
    """Call `worker(rank, world_size, *args)` on every rank of the notebook's shared pool.

    world_size: how many ranks. backend: "auto", "gloo" or "nccl". timeout: seconds, or None.

    The first call starts the processes; they stay warm for the next one. Raises as
    `WorkerPool.run` does.
    """
    global _shared
    check_world_size(world_size)
    chosen = choose_backend(backend, world_size)
    check_signature(worker, args)
    if _shared is None or _shared._closed:
        _shared = WorkerPool(world_size, backend)
    return _shared._run(worker, args, world_size, chosen, timeout)
