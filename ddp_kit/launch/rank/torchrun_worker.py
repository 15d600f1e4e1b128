"""What a rank started by `kit.torchrun` does.

On the notebook's own host it connects to the notebook's socket and gets pipes and a board, as the
ranks of a pool do, so its prints, errors and waits are visible at once. On another host it puts a
report into torchrun's store, from which rank 0 collects it.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TextIO

import cloudpickle
import torch
import torch.distributed as dist

from ddp_kit import backends
from ddp_kit.error_text import RankFailure
from ddp_kit.errors import PoolError
from ddp_kit.launch.rank import environment
from ddp_kit.launch.rank.clocks import compare_clocks
from ddp_kit.pool.rank.bootstrap import serve_connected
from ddp_kit.pool.rank.server import GROUP_TIMEOUT, call_worker, describe
from ddp_kit.pool.rank.server import pack as pack_value
from ddp_kit.pool.wire.messages import CALL, SOCKET
from ddp_kit.pool.wire.output import OUTPUT_LIMIT
from ddp_kit.trace import (
    EMPTY,
    Board,
    Clock,
    InternTable,
    RankTrace,
    Snapshot,
    join,
    recording,
    unrecorded,
)
from ddp_kit.trace.rank import recorder

COLLECT_TIMEOUT = 300.0  # seconds for the ranks of other hosts, after rank 0 has returned
REASON_TIMEOUT = 1.0  # seconds for another host to report why its ranks are gone

_environment: dict[str, str] = {}  # torchrun's; a pool replaces it with the notebook's
_failed = False  # whether the worker has failed


@dataclass
class RemoteReport:
    """What a rank on another host reports to the notebook."""

    value: Any = None
    output: str = ""
    trace: RankTrace | None = None
    failure: RankFailure | None = None


@dataclass
class LocalReport:
    """What a rank on the notebook's host returns: its own value, and reports of remote ranks."""

    value: Any
    remote: dict[int, RemoteReport] = field(default_factory=dict)


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
class Program:
    """A worker as each rank calls it: in a process group that the ranks form first.

    backend: None if the worker forms its group itself.
    """

    worker: Callable[..., Any]
    args: tuple
    backend: str | None

    def __call__(self, rank: int, world_size: int) -> LocalReport:
        """Run the worker on the notebook's own host."""
        global _failed
        os.environ.clear()
        os.environ.update(_environment)
        _, started, _, here = environment.rank_info()
        others = range(here, world_size)
        try:
            if started != world_size:
                raise PoolError(
                    f"torchrun has started {started} ranks instead of {world_size}; run the "
                    "printed command unchanged on every host"
                )
            value, _ = self.call(rank, world_size)
            return LocalReport(value, _collect(others, COLLECT_TIMEOUT) if rank == 0 else {})
        except BaseException as error:
            _failed = True
            broken, _ = (recorder.current and recorder.current.broken) or (None, None)
            if others and broken == id(error):
                reports = _collect(others, REASON_TIMEOUT)
                if any(report.failure for report in reports.values()):
                    return LocalReport(None, reports)
            raise

    def call(self, rank: int, world_size: int) -> tuple[Any, Clock | None]:
        """Call the worker; return its value, and this host's clock relative to rank 0's."""
        _, _, local_rank, local_size = environment.rank_info()
        several_hosts = local_size < world_size
        clock = None
        if several_hosts:
            with unrecorded(), _group("gloo", environment.JOIN_TIMEOUT):
                clock = compare_clocks()
        backends.share_cores(local_size)
        backends.take_device(self.backend or "gloo", local_rank)
        if self.backend is None:
            return self._value(rank, world_size), clock
        # On one host only the notebook ends a wait.
        limit = environment.JOIN_TIMEOUT if several_hosts else GROUP_TIMEOUT
        with _group(backends.for_group(self.backend), limit):
            return self._value(rank, world_size), clock

    def _value(self, rank: int, world_size: int) -> Any:
        """Call the worker. Exit code 0 is success, as it is for torchrun."""
        try:
            value = call_worker(self.worker, rank, world_size, self.args)
        except SystemExit as leaving:
            if leaving.code:
                raise
            return None
        pack_value(value).close()  # raises for what cannot be sent
        return value


@contextmanager
def _group(backend: str, timeout: timedelta) -> Iterator[None]:
    """Join a group. After an error it is kept, else others would report a broken connection."""
    environment.join_group(backend, timeout)
    with unrecorded():
        # Otherwise a rank that finishes at once could leave before others have connected to it.
        dist.all_reduce(torch.zeros(1), async_op=True).wait(environment.JOIN_TIMEOUT)
    yield
    if dist.is_initialized():  # the worker may have left it
        dist.destroy_process_group()


def run(packed: str) -> None:
    """Run as a rank of the program in `packed`; exit with 1 if its worker has failed."""
    _environment.update(os.environ)
    path = _environment.pop(SOCKET, None)
    rank = environment.rank_info().rank
    if path is None:
        environment.end_with_agent()
        _run_elsewhere(packed, rank)
        return
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    line.sendall(CALL.pack(environment.attempt(), rank, os.getpid()))
    serve_connected(line)
    sys.exit(_failed)


def pack(program: Program) -> str:
    """Return a program as text, for the file that torchrun runs."""
    return base64.b64encode(cloudpickle.dumps(program)).decode()


def _key(rank: int) -> str:
    return f"ddp_kit report {environment.attempt()} {rank}"


def _run_elsewhere(packed: str, rank: int) -> None:
    """Run the program on another host; put a report of it into the store."""
    world_size = environment.rank_info().world_size
    board, report, printed = Board(), RemoteReport(), io.StringIO()
    os.register_at_fork(after_in_child=board.unshare)
    out, err = _Tee(printed, sys.stdout), _Tee(printed, sys.stderr)
    clock = None
    try:
        with recording(InternTable(board)), redirect_stdout(out), redirect_stderr(err):
            program: Program = pickle.loads(base64.b64decode(packed))
            report.value, clock = program.call(rank, world_size)
    except BaseException as error:
        report.failure = describe(rank, error)
        raise
    finally:
        report.output = printed.getvalue()
        logs = [board.read() if other == rank else EMPTY for other in range(world_size)]
        trace = join(list(map(Snapshot, range(world_size), logs)))
        report.trace = RankTrace.of(trace, rank, "", clock)
        with suppress(dist.DistError):  # rank 0's host is gone
            environment.store().set(_key(rank), cloudpickle.dumps(report))
            environment.store().get(_key(rank))  # returns once it has arrived


def _collect(ranks: Iterable[int], seconds: float) -> dict[int, RemoteReport]:
    """Return the reports of ranks on other hosts that arrive in time, or until one failed."""
    found: dict[int, RemoteReport] = {}
    missing, deadline = set(ranks), time.monotonic() + seconds
    while missing and time.monotonic() < deadline:
        for rank in sorted(missing):
            with suppress(dist.DistError):  # the store may be gone with its host
                if environment.store().check([_key(rank)]):
                    found[rank] = pickle.loads(environment.store().get(_key(rank)))
                    missing.discard(rank)
        if any(report.failure for report in found.values()):
            deadline = min(deadline, time.monotonic() + REASON_TIMEOUT)
        if missing:
            time.sleep(0.02)
    return found


class _Tee:
    """A stream that keeps what it writes to another."""

    def __init__(self, kept: io.StringIO, stream: TextIO) -> None:
        self._kept, self._stream = kept, stream

    def write(self, text: str) -> int:
        """Write, and keep as much as a rank of a pool may print."""
        self._kept.write(text[: max(0, OUTPUT_LIMIT - self._kept.tell())])
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
