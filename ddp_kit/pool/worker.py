"""The child side of the pool: what a rank's process does. Everything here runs in a rank."""

from __future__ import annotations

import ctypes
import linecache
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.connection import Connection
from typing import NoReturn

import torch.distributed as dist

from ddp_kit import backends
from ddp_kit.failures import RankFailure
from ddp_kit.pool import values
from ddp_kit.pool.messages import Form, Formed, Left, Raised, Returned, Run, Surroundings
from ddp_kit.pool.modules import Imports
from ddp_kit.pool.state import State, thread_left_running
from ddp_kit.trace import Board, describe_line, recording

LONGEST_MESSAGE = 10_000  # characters of an exception's text
# A training run may keep a rank waiting for hours; the pool ends what must end.
GROUP_TIMEOUT = timedelta(days=30)

_C = ctypes.CDLL(None)  # the C library of this process

serving = False  # True in a rank's process, where no pool may be started


def main(
    _index: int,
    control: Connection,
    output: Connection,
    board: Board,
    parent: int,
    pool: int | None = None,
) -> None:
    """Serve the pool until its end of `control` closes. Runs in a rank.

    `torch.multiprocessing.spawn` calls this with an index that is always 0: every rank is
    started by a call of its own, so that one can be replaced without the others.

    parent: its process id. pool: a handle that becomes ready when the pool's process ends, where
    that is not the parent.
    """
    global serving
    serving = True
    # It came blocked; ignored is what this process's own children should inherit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    _leave_resource_tracker()
    if sys.platform == "linux":
        # A spawned process would spawn in its turn, and a DataLoader's workers would then need
        # a dataset that can be imported. Those of a torchrun process are forked.
        multiprocessing.set_start_method("fork", force=True)
    _keep_descriptors_from_children()
    _die_with(parent, pool)
    _send_prints_to(output)
    board.answer_with_stacks()
    member = _Member(board)
    while True:
        try:
            message = values.receive(control)
        except (EOFError, ConnectionResetError):
            return
        reply = member.form(message) if isinstance(message, Form) else member.run(message)
        _flush()
        values.send(control, reply)
        if isinstance(reply, Returned):
            reply.parcel.close()
        del message, reply  # an idle rank holds nothing of the last run
        member.tidy()


class _Member:
    """This process's part in the pool: its rank, its group, the runs it is asked for."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.place: Form | None = None
        self.group: dist.ProcessGroup | None = None
        self.state = State()
        self.around: Surroundings | None = None  # told with the first run
        self.tidied = False  # True: nothing is left of the last run
        self.imports = Imports()

    def form(self, place: Form) -> Formed | Raised:
        self.place = place
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            # Groups are named by their number, alike on all ranks; one that failed has counted.
            dist.distributed_c10d._world.group_count = 0
            os.environ.update(backends.LOOPBACK_ENVIRONMENT)
            backends.take_device(place.backend, place.rank)
            if place.store is not None:
                dist.init_process_group(
                    backends.for_group(place.backend),
                    store=dist.FileStore(place.store, place.world_size),
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=GROUP_TIMEOUT,
                )
            self.group = dist.group.WORLD  # None where there is none
        except Exception as error:
            return Raised(describe(place.rank, error), Left(self.imports.take()))
        return Formed(Left(self.imports.take()))

    def run(self, job: Run) -> Returned | Raised:
        assert self.place is not None, "the pool sends Form before Run"
        rank, world_size = self.place.rank, self.place.world_size
        if job.surroundings:
            self.around, self.tidied = job.surroundings, False
        for name, source in job.cells.items():
            # No mtime: linecache keeps such an entry, as it does for IPython's own.
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        groups, keeps = _count_groups(), False
        with recording(self.board, job.number) as recorder, warnings.catch_warnings():
            try:
                if not self.tidied:
                    self._restore()
                self.tidied = False
                worker, args = job.parcel.unpack()
                keeps = getattr(worker, "keeps_groups", False)
                value = worker(rank, world_size, *args)
                parcel = pack(value)
            except SystemExit as leaving:
                _leave(leaving.code)
            except BaseException as error:
                broken, inside = recorder.broken or (None, None)
                failure = describe(rank, error)
                whole = keeps and broken is None and recorder.all_awaited
                left = self._left(whole, groups)
                return Raised(failure, left, inside if broken == id(error) else None)
        return Returned(parcel, self._left(recorder.all_awaited, None if keeps else groups))

    def tidy(self) -> None:
        """Get ready for the next run, now that the pool has the reply and nobody waits."""
        self.tidied = False
        if self.around:
            with suppress(Exception):  # the next run tries again, and tells it
                self._restore()
                self.tidied = True

    def _restore(self) -> None:
        assert self.place, "the pool sends Form before Run"
        assert self.around, "and its surroundings with the first Run"
        self.state.restore(self.place, self.around)

    def _left(self, whole: bool, groups: tuple | None = None) -> Left:
        intact = whole and self._group_is_intact(groups)
        return Left(self.imports.take(), intact, thread_left_running())

    def _group_is_intact(self, groups: tuple | None) -> bool:
        """Whether there are the groups that there were; None: more of them may stay."""
        if self.group is None and dist.distributed_c10d._world.group_count:
            return False  # one that failed has counted
        return dist.group.WORLD is self.group and groups in (None, _count_groups())


def _count_groups() -> tuple[int, int]:
    """Return how many groups there are, and how many were made; there is no public way."""
    world = dist.distributed_c10d._world
    return len(world.pg_map), world.group_count


def pack(value: object) -> values.Parcel:
    """Pickle what a worker returned; raise TypeError in one sentence if that cannot be."""
    failed: Exception | None = None
    try:
        if not values.holds_module(value):
            return values.pack(value)
    except Exception as error:
        failed = error
    path, culprit, reason = values.find_culprit(value, modules=False) or ("", value, failed)
    what = f"a {type(culprit).__name__}"
    if path:
        what = f"a {type(value).__name__} whose {path} is {what}"
    raise TypeError(
        f"the worker returned {what}, which cannot be sent to the notebook ({reason}); "
        "return tensors, numbers, strings, or lists and dicts of them"
    ) from None


def describe(rank: int, error: BaseException) -> RankFailure:
    """Turn an exception into plain data that the parent can hold without the rank's modules."""
    frames = tuple(
        describe_line(line.filename, line.lineno or 0, line.name)
        for line in traceback.extract_tb(error.__traceback__)
    )
    try:
        message = str.__str__(str(error))[:LONGEST_MESSAGE]  # a plain str, whatever it was
    except Exception:  # the learner's own __str__ may fail
        message = "(its message could not be read)"
    return RankFailure(rank, type(error).__name__, message, frames)


def _die_with(parent: int, pool: int | None) -> None:
    """End this process as soon as `parent` or the pool has ended, however that happened."""
    end_with_parent()
    if sys.platform == "linux":
        # What a rank's children leave running stays its own, so that the pool finds it.
        PR_SET_CHILD_SUBREAPER = 36
        _C.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)

    spawner = parent_process()
    watched = spawner.sentinel if spawner else pool
    assert watched is not None, "a rank belongs to a pool"

    def watch() -> None:
        connection.wait([watched])
        os._exit(1)

    threading.Thread(target=watch, name="ddp_kit watches the parent", daemon=True).start()


@cache
def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, and its own forks when it ends.

    Linux can do that, and nobody else: a rank stuck in native code runs no Python.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1
    _C.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A fork forgets that; the workers of a DataLoader are such forks. The signal also comes
    # when the thread that forked ends, so only the main thread's children get it.
    by_main: list[bool] = []
    os.register_at_fork(
        before=lambda: by_main.append(threading.current_thread() is threading.main_thread()),
        after_in_parent=by_main.clear,
        after_in_child=lambda: by_main[-1] and _C.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def _leave_resource_tracker() -> None:
    """Forget the stand-in that the pool has passed; what is tracked here gets its own tracker."""
    tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = tracker._pid = None


def _keep_descriptors_from_children() -> None:
    """Close the pool's pipes in programs that a worker starts; they would hide our own end."""
    if os.path.isdir("/proc/self/fd"):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own descriptor is closed by now
                if int(name) > 2:
                    os.set_inheritable(int(name), False)


def _send_prints_to(output: Connection) -> None:
    """Point file descriptors 1 and 2 at the pool, so that C++ and grandchildren come along."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115 - it stays open as long as the process
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _leave(code: object) -> NoReturn:
    """End the process as `sys.exit(code)` asks, but wait for no thread; the pool tells it."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    _flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


def _flush() -> None:
    """Write out what Python and C still hold back, so that it belongs to this run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the worker closed it, or put something else in its place
            continue
    if os.name == "posix":
        _C.fflush(None)
