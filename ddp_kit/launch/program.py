"""What a rank does that torchrun has started for `kit.torchrun`.

On the notebook's own host it calls the notebook's socket, and gets pipes and a board as the ranks
of a pool do: so its prints, errors and waits are seen at once. On another host it leaves what it
has to tell in the store in which torchrun's ranks meet, and rank 0 takes it from there.
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
import torch.distributed as dist

from ddp_kit import backends
from ddp_kit.errors import PoolError
from ddp_kit.failures import RankFailure
from ddp_kit.launch import place
from ddp_kit.launch.clocks import compare_clocks
from ddp_kit.pool.member import serve
from ddp_kit.pool.mpi_member import CALL
from ddp_kit.pool.process import OUTPUT_LIMIT
from ddp_kit.pool.torchrun_job import SOCKET
from ddp_kit.pool.worker import GROUP_TIMEOUT, describe, end_with_parent
from ddp_kit.pool.worker import pack as pack_value
from ddp_kit.trace import (
    EMPTY,
    Board,
    Clock,
    RankTrace,
    Snapshot,
    join,
    recorder,
    recording,
    unrecorded,
)

COLLECT_TIMEOUT = 300.0  # seconds for the ranks of other hosts, after rank 0 has returned
REASON_TIMEOUT = 1.0  # seconds for another host to say why its ranks are gone

_told: dict[str, str] = {}  # torchrun's environment; a rank of a pool is given another one
_failed = False  # the worker did


@dataclass
class Told:
    """What a rank on another host leaves for the notebook."""

    value: Any = None
    output: str = ""
    part: RankTrace | None = None
    failure: RankFailure | None = None


@dataclass
class Said:
    """What a rank on the notebook's host returns: its own value, and what others have left."""

    value: Any
    elsewhere: dict[int, Told] = field(default_factory=dict)


@dataclass
class Script:
    """A module or a file as a worker; it forms a group itself, if it wants one."""

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
    """A worker, as each rank calls it: in a process group that the ranks form first.

    backend: None: the worker forms its group itself.
    """

    worker: Callable[..., Any]
    args: tuple
    backend: str | None

    def __call__(self, rank: int, world_size: int) -> Said:
        """Be a rank on the notebook's own host."""
        global _failed
        os.environ.clear()
        os.environ.update(_told)
        _, told, _, here = place.read_place()
        others = range(here, world_size)
        try:
            if told != world_size:
                raise PoolError(
                    f"torchrun has started {told} ranks, and {world_size} were asked for; every "
                    "host must be started with the line as it was printed"
                )
            value, _ = self.call(rank, world_size)
            return Said(value, _collect(others, COLLECT_TIMEOUT) if rank == 0 else {})
        except BaseException as error:
            _failed = True
            broken, _ = (recorder.current and recorder.current.broken) or (None, None)
            if others and broken == id(error):
                left = _collect(others, REASON_TIMEOUT)
                if any(told.failure for told in left.values()):
                    return Said(None, left)
            raise

    def call(self, rank: int, world_size: int) -> tuple[Any, Clock | None]:
        """Call the worker; return its value, and how this host's clock stands to rank 0's."""
        _, _, local_rank, local_size = place.read_place()
        several_hosts = local_size < world_size
        clock = None
        if several_hosts:
            with unrecorded(), _group("gloo", place.JOIN_TIMEOUT):
                clock = compare_clocks()
        backends.share_cores(local_size)
        backends.take_device(self.backend or "gloo", local_rank)
        if self.backend is None:
            return self._value(rank, world_size), clock
        # On one host nothing but the notebook's own watch ends a wait.
        limit = place.JOIN_TIMEOUT if several_hosts else GROUP_TIMEOUT
        with _group(backends.for_group(self.backend), limit):
            return self._value(rank, world_size), clock

    def _value(self, rank: int, world_size: int) -> Any:
        """Call the worker. Leaving with exit code 0 is success, as torchrun has it."""
        try:
            value = self.worker(rank, world_size, *self.args)
        except SystemExit as leaving:
            if leaving.code:
                raise
            return None
        pack_value(value).close()  # to tell what cannot be sent, and to fail because of it
        return value


@contextmanager
def _group(backend: str, timeout: timedelta) -> Iterator[None]:
    """Be in a group. One that an error ends stays: the others would see a broken connection."""
    place.join(backend, timeout)
    yield
    if dist.is_initialized():  # the worker may have left it
        dist.destroy_process_group()


def run(packed: str) -> None:
    """Be a rank of the program in `packed`; end this process if it has failed."""
    _told.update(os.environ)
    path = _told.pop(SOCKET, None)
    rank = place.read_place().rank
    if path is None:
        end_with_parent()
        _run_elsewhere(packed, rank)
        return
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    line.sendall(CALL.pack(place.attempt(), rank, os.getpid()))
    serve(line)
    sys.exit(_failed)


def pack(program: Program) -> str:
    """Return a program as text, for a file that torchrun starts."""
    return base64.b64encode(cloudpickle.dumps(program)).decode()


def _key(rank: int) -> str:
    return f"ddp_kit told {place.attempt()} {rank}"


def _run_elsewhere(packed: str, rank: int) -> None:
    """Run the program on another host; leave what came of it in the store."""
    world_size = place.read_place().world_size
    board, told, printed = Board(), Told(), io.StringIO()
    out, err = _Both(printed, sys.stdout), _Both(printed, sys.stderr)
    clock = None
    try:
        with recording(board), redirect_stdout(out), redirect_stderr(err):
            program: Program = pickle.loads(base64.b64decode(packed))
            told.value, clock = program.call(rank, world_size)
    except BaseException as error:
        told.failure = describe(rank, error)
        raise
    finally:
        told.output = printed.getvalue()
        logs = [board.read() if other == rank else EMPTY for other in range(world_size)]
        trace = join(list(map(Snapshot, range(world_size), logs)))
        told.part = RankTrace.of(trace, rank, "", clock)
        with suppress(dist.DistError):  # rank 0's host is gone: nobody asks
            place.store().set(_key(rank), cloudpickle.dumps(told))
            place.store().get(_key(rank))  # it has arrived


def _collect(ranks: Iterable[int], seconds: float) -> dict[int, Told]:
    """Take what ranks on other hosts have left, as far as it comes in time or tells a failure."""
    found: dict[int, Told] = {}
    missing, deadline = set(ranks), time.monotonic() + seconds
    while missing and time.monotonic() < deadline:
        for rank in sorted(missing):
            with suppress(dist.DistError):  # the store may be gone with its host
                if place.store().check([_key(rank)]):
                    found[rank] = pickle.loads(place.store().get(_key(rank)))
                    missing.discard(rank)
        if any(told.failure for told in found.values()):
            deadline = min(deadline, time.monotonic() + REASON_TIMEOUT)
        if missing:
            time.sleep(0.02)
    return found


class _Both:
    """A stream that keeps what it passes on."""

    def __init__(self, kept: io.StringIO, stream: TextIO) -> None:
        self._kept, self._stream = kept, stream

    def write(self, text: str) -> int:
        """Write, and keep as much as a rank of a pool may print."""
        self._kept.write(text[: max(0, OUTPUT_LIMIT - self._kept.tell())])
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
