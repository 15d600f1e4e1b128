"""What a rank started by `kit.torchrun` does.

On the notebook's own host it connects to the notebook's socket and gets pipes and a board, as the
ranks of a pool do, so its prints, errors and waits are visible at once. On another host an observer
beside it shows its board to the notebook through torchrun's store, and at the end the rank puts a
report there.
"""

from __future__ import annotations

import base64
import builtins
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import torch.distributed as dist

from ddp_kit import backends
from ddp_kit.errors import PoolError
from ddp_kit.pool.rank import environment
from ddp_kit.pool.rank.bootstrap import connect, leave, serve_connected
from ddp_kit.pool.rank.observer import Observer
from ddp_kit.pool.rank.server import GROUP_TIMEOUT, call_worker, describe
from ddp_kit.pool.rank.server import pack as pack_value
from ddp_kit.pool.wire.messages import SOCKET
from ddp_kit.pool.wire.output import KeptOutput
from ddp_kit.pool.wire.payload import pickle_whole
from ddp_kit.pool.wire.torchrun_store import CUT, ENDS, OVER, RAISED, RETURNED, RemoteReport, encode
from ddp_kit.trace import Board, Clock, InternTable, recording, unrecorded

_environment: dict[str, str] = {}  # torchrun's; a pool replaces it with the notebook's
_failed = False  # whether the worker has failed


@dataclass
class Script:
    """A module or a file as a worker; it forms a group itself if it needs one."""

    name: str

    def __call__(self, rank: int, world_size: int, *options: str) -> None:
        """Run it as torchrun would, with these options on its command line."""
        before, sys.argv[:] = list(sys.argv), [self.name, *options]
        try:
            if self.name.endswith(".py"):
                sys.path.insert(0, os.path.dirname(os.path.abspath(self.name)))
                runpy.run_path(self.name, run_name="__main__")
            else:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        finally:
            sys.argv[:] = before


@dataclass
class Task:
    """A worker as each rank calls it: in a process group that the ranks form first.

    backend: None if the worker forms its group itself.
    """

    worker: Callable[..., Any]
    args: tuple
    backend: str | None

    def __call__(self, rank: int, world_size: int) -> Any:
        """Run the worker on the notebook's own host."""
        global _failed
        os.environ.clear()
        os.environ.update(_environment)
        _, started, *_ = environment.rank_info()
        try:
            if started != world_size:
                raise PoolError(
                    f"torchrun has started {started} ranks instead of {world_size}; run the "
                    "printed command unchanged on every host"
                )
            value, _ = self.call(rank, world_size)
        except BaseException:
            _failed = True
            raise
        return value

    def call(self, rank: int, world_size: int) -> tuple[Any, Clock | None]:
        """Call the worker; return its value, and this host's clock relative to rank 0's.

        The rank stays in the process group, as those of a pool do: others would report a broken
        connection instead of what they were waiting for.
        """
        _, _, local_rank, local_size = environment.rank_info()
        clock = None
        if local_size < world_size:
            with unrecorded():
                environment.join_group("gloo")
                clock = environment.compare_clocks()
                dist.destroy_process_group()
        backends.share_cores(local_size)
        backends.take_device(self.backend or "gloo", local_rank)
        if self.backend is not None:
            environment.join_group(backends.for_group(self.backend), GROUP_TIMEOUT)
        value = call_worker(self.worker, rank, world_size, self.args)
        pack_value(value).close()  # raises for what cannot be sent
        return value, clock


def _leave_group() -> None:
    """Leave the process group, unless the worker has."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run(packed: str) -> None:
    """Run as a rank of the task in `packed`; exit with 1 if its worker has failed."""
    _environment.update(os.environ)
    path = _environment.pop(SOCKET, None)
    rank = environment.rank_info().rank
    if path is None:
        _run_elsewhere(packed, rank)
        leave(0)
    serve_connected(connect(path, rank))
    if not _failed:
        _leave_group()
    leave(int(_failed))


def pack(task: Task) -> str:
    """Return a task as text, for the file that torchrun runs."""
    return base64.b64encode(pickle_whole(task, for_ranks=True)).decode()


def _run_elsewhere(packed: str, rank: int) -> None:
    """Run the task on another host; put a report of it into the store."""
    world_size = environment.rank_info().world_size
    board, report, printed = Board(), RemoteReport(), KeptOutput()
    observer = Observer(board, rank)  # a fork, which shares the board
    os.register_at_fork(after_in_child=board.unshare)
    environment.end_with_agent()  # not the observer, which reports that this process has ended
    board.answer_with_stacks()
    builtins.display = _display  # type: ignore[attr-defined]
    out, err = _Tee(printed, sys.stdout), _Tee(printed, sys.stderr)
    how, recorder = RETURNED, None
    try:
        with (
            recording(InternTable(board), 1, rank) as recorder,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            task: Task = pickle.loads(base64.b64decode(packed))
            value, report.clock = task.call(rank, world_size)
            report.value = pickle_whole(value)
    except BaseException as error:
        report.failure = describe(rank, error)
        broken, _ = (recorder and recorder.broken) or (None, None)
        how = CUT if broken == id(error) else RAISED
        raise
    finally:
        report.output, report.log = printed.text(), board.read()
        with suppress(dist.DistError):  # the notebook's host is gone
            _send(report, rank, how)
        if how == RETURNED:
            _leave_group()
        observer.end()


def _display(*values: object, **_options: object) -> None:
    """Print values, because only the ranks on the notebook's host show pictures."""
    print(*values)


def _send(report: RemoteReport, rank: int, how: str) -> None:
    """Put a report into the store. If the worker has returned, wait until all have."""
    store = environment.own_store()
    store.set(f"report {rank}", encode(report))
    store.append(ENDS, f"{rank} {how}\n")
    if how == RETURNED:
        store.wait([OVER], GROUP_TIMEOUT)  # the observer ends this process if the host is lost


class _Tee:
    """A stream that keeps what it writes to another, as much of it as the pipe of a rank does."""

    def __init__(self, kept: KeptOutput, stream: TextIO) -> None:
        self._kept, self._stream = kept, stream

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self._kept.add(text.encode("utf-8", errors="replace"))
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
