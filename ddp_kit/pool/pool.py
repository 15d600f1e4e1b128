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
import re
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ddp_kit.backends import choose_backend
from ddp_kit.errors import PoolError
from ddp_kit.pool import cells, view
from ddp_kit.pool.messages import Form, Run
from ddp_kit.pool.outcome import START_TIMEOUT, Outcome
from ddp_kit.pool.process import RankProcess, holding_interrupt
from ddp_kit.pool.request import check_signature, check_timeout, check_world_size, pack
from ddp_kit.pool.result import Result, print_output

FOLDER = "ddp_kit-"  # how a pool's folder is called; the process id and a random part follow


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
        self._owner = os.getpid()
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        with holding_interrupt():
            sweep_folders()
            self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-")
            atexit.register(self._at_exit)
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
        if self._closed:
            raise PoolError("this pool is closed; make a new WorkerPool")
        backend, payload = _prepare(worker, args, size, self._asked_backend, timeout)
        return self._run(payload, size, backend, timeout)

    def _run(self, payload: bytes, world_size: int, backend: str, timeout: float | None) -> Result:
        if self._running:
            raise PoolError("this pool is in the middle of a run; wait for it, or interrupt it")
        self._running = True
        try:
            with holding_interrupt():
                self._form(world_size, backend)
            shown = view.open_view(world_size)
            outcome = Outcome(self._ranks, shown, starting=True)
            try:
                if outcome.collect(START_TIMEOUT):  # the replies to Form, of whoever owes one
                    outcome = Outcome(self._ranks[:world_size], shown)
                    self._send_job(outcome.ranks, payload)
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
            # IPython shows this instead of where in the pool the wait was.
            interrupt._render_traceback_ = lambda: [  # type: ignore[attr-defined]
                "KeyboardInterrupt: the run was stopped; ranks that had not returned were ended"
            ]
            raise
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
        if self._closed or os.getpid() != self._owner:  # a forked child only has copies
            return
        in_main_thread = threading.current_thread() is threading.main_thread()
        with holding_interrupt() if in_main_thread else nullcontext():
            self._closed = True
            self._end_ranks()
            shutil.rmtree(self._folder, ignore_errors=True)
            atexit.unregister(self._at_exit)

    def _form(self, world_size: int, backend: str) -> None:
        """Have `world_size` living processes in one group, at the price of what is missing."""
        if not all(rank.alive for rank in self._ranks):
            self._formed = None
            for index, rank in enumerate(self._ranks):
                # One that owes a reply may wait for the dead one in the group they were to form.
                if rank.owed or not rank.alive:
                    rank.stop()
                    self._ranks[index] = RankProcess()
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
            rank.send(Run(payload, new, list(sys.path), os.getcwd()))
            rank.cells_seen |= new.keys()

    def _end_ranks(self) -> None:
        ranks, self._ranks, self._formed = self._ranks, [], None
        for rank in ranks:
            rank.dismiss()  # all at once: they leave side by side
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
        backend = self._formed[1] if self._formed else self._backend
        return f"WorkerPool({len(self._ranks) or self._world_size} ranks, {backend}, {state})"


def sweep_folders() -> None:
    """Remove the folders of this user's pools whose process is gone, killed or shut down."""
    import psutil

    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        named = re.fullmatch(rf"{FOLDER}(\d+)-\w{{8}}", folder.name)
        try:
            ours = folder.is_dir() and folder.lstat().st_uid == os.getuid()
        except OSError:
            continue  # another pool was quicker
        if named and ours and not psutil.pid_exists(int(named.group(1))):
            shutil.rmtree(folder, ignore_errors=True)


def _close_if_alive(reference: weakref.ref) -> None:
    pool = reference()
    if pool is not None:
        pool.close()


def _prepare(
    worker: Callable[..., Any], args: tuple, world_size: int, backend: str, timeout: float | None
) -> tuple[str, bytes]:
    """Refuse what cannot be run, before anything starts; return the backend and the payload."""
    check_world_size(world_size)
    chosen = choose_backend(backend, world_size)
    check_timeout(timeout)
    check_signature(worker, args)
    return chosen, pack(worker, args)


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
    chosen, payload = _prepare(worker, args, world_size, backend, timeout)
    if _shared is None or _shared._closed:
        _shared = WorkerPool(world_size, backend)
    return _shared._run(payload, world_size, chosen, timeout)
