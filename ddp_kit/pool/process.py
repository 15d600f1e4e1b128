"""The parent's handle on one rank's process: start it, talk to it, end it."""

from __future__ import annotations

import os
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.multiprocessing as mp

from ddp_kit.errors import PoolError
from ddp_kit.failures import Frame
from ddp_kit.pool import values, worker
from ddp_kit.pool.children import MARK, descendants, handle_of, kill, marked
from ddp_kit.pool.interrupts import holding_interrupt
from ddp_kit.pool.messages import Surroundings
from ddp_kit.pool.modules import Stamp
from ddp_kit.trace import Board, stacks

OUTPUT_LIMIT = 200_000  # bytes that one rank may print in one run; the rest is dropped
_CHUNK = 1 << 16  # no larger than a pipe holds, so one read empties it
_NEWEST = 1000  # bytes of what was printed last that are there for the live view


class Ends(NamedTuple):
    """What a rank is born with: its ends of the pipes, its board, and the mark of its children."""

    control: Connection
    printed: Connection
    board: Board
    mark: str


class Process(Protocol):
    """What the pool asks of a process: multiprocessing's own, or one that mpiexec has started."""

    pid: int
    sentinel: int  # a handle that becomes ready when it ends

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it runs."""


def followed(process: Process) -> bool:
    """Tell whether somebody ended it because another rank had ended; mpiexec does so."""
    return getattr(process, "followed", False)


def why_not_ready(process: Process) -> str:
    """Return what a program has said last of why its ranks did not come; "" if it said nothing."""
    return getattr(process, "why_not_ready", str)()


def spawn(ends: Ends) -> tuple[Process, Callable[[], None]]:
    """Start a process with these ends; return it, and what tidies up after it."""
    with (
        holding_interrupt(),
        _empty_main_module(),
        _no_resource_tracker(),
        _environment(MARK, ends.mark),
    ):
        given = ends.control, ends.printed, ends.board, os.getpid()
        started = mp.spawn(worker.main, given, nprocs=1, join=False)
    error_file = Path(started.error_files[0])  # torch writes it if the rank's own code fails
    return started.processes[0], partial(error_file.unlink, missing_ok=True)


class RankProcess:
    """The process of one rank, its control pipe, and the pipe that its prints come through.

    start: gives a process its ends of the pipes.
    """

    def __init__(self, start: Callable[[Ends], tuple[Process, Callable[[], None]]] = spawn) -> None:
        try:
            self.control, control_end = Pipe()
            self.printed, print_end = Pipe(duplex=False)
            self.board = Board()
            self._mark = uuid.uuid4().hex
            ends = Ends(control_end, print_end, self.board, self._mark)
            self.process, self._tidy_up = start(ends)
        except OSError as error:
            raise PoolError(
                f"no further process can be started here ({error.strerror}); "
                "use a smaller world_size, or close pools that are not needed"
            ) from error
        os.set_blocking(self.printed.fileno(), False)
        control_end.close()
        print_end.close()
        self.board.close_file()
        self._handle = handle_of(self.process.pid)
        self.owed = 0  # replies this rank has not given yet
        self.cells_seen: set[str] = set()
        self.surroundings: Surroundings | None = None  # what it was told last
        self.modules: dict[str, Stamp] = {}  # the learner's files that it has imported
        self._children: list = []
        self.printing = True  # False once it has closed both its stdout and its stderr
        self._output = bytearray()
        self._cut = False
        self.newest = b""  # what it has printed last

    @property
    def sentinel(self) -> int:
        """A handle that becomes ready when the process ends."""
        return self.process.sentinel

    def send(self, message: Any) -> None:
        """Send one message; a rank that has died says so through its sentinel, not here."""
        self.owed += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            values.send(self.control, message)

    def receive(self) -> Any:
        """Return the next reply, or None if the rank ended before it gave one."""
        try:
            reply = values.receive(self.control)
        except (EOFError, OSError):
            return None
        self.owed -= 1
        self.modules |= reply.left.modules
        return reply

    def read_output(self) -> bool:
        """Take in what the rank has printed by now; False when there was nothing."""
        try:
            data = os.read(self.printed.fileno(), _CHUNK)
        except (BlockingIOError, OSError):
            return False
        self.printing = bool(data)
        room = OUTPUT_LIMIT - len(self._output)
        self._output += data[:room]
        self.newest = (self.newest + data[-_NEWEST:])[-_NEWEST:]
        self._cut = self._cut or len(data) > room
        return bool(data)

    def drain_output(self) -> None:
        """Take in all that is in the pipe, but not what a flood keeps adding."""
        for _ in range(32):
            if not self.read_output():
                return

    def take_output(self) -> str:
        """Return what was printed since the last call, as text."""
        text = self._output.decode("utf-8", errors="replace")
        if self._cut:
            text += f"\n... cut here: a rank may print {OUTPUT_LIMIT:,} bytes in one run\n"
        self._output, self._cut, self.newest = bytearray(), False, b""
        return text

    def stacks(self) -> list[list[Frame]]:
        """Ask the rank which lines it runs: those of each thread, the main thread's first.

        An empty list: it gave no answer.
        """
        return stacks.parse(stacks.ask(self.process.pid, self.board.read_stacks))

    @property
    def alive(self) -> bool:
        """Whether the process runs and can be talked to."""
        if self.control.closed or self.process.exitcode is not None:
            return False
        try:
            os.kill(self.process.pid, 0)  # other code may have fetched its exit code
        except ProcessLookupError:
            return False
        return True

    def stop(self, patience: float = 0.0) -> None:
        """End the process and its children: let it leave for `patience` seconds, then kill it."""
        self.dismiss()
        self.join(patience)
        self.kill()
        self.join(5)
        self.printed.close()
        self.board.close()
        self._tidy_up()

    def dismiss(self) -> None:
        """Tell the process to leave; remember its children, who would be lost without it."""
        if not self.control.closed:
            self._children = descendants(self._handle) if self.alive else marked(self._mark)
        self.control.close()

    def kill(self) -> None:
        """End the process and its children at once."""
        self._children += descendants(self._handle)
        for process in [self._handle, *self._children]:
            kill(process)

    def join(self, seconds: float) -> int | None:
        """Wait for the process to end; return its exit code.

        None: it has not ended, or other code in this process has fetched its exit code.
        `Process.join` would wait for the sentinel, which a grandchild may hold open.
        """
        deadline = time.monotonic() + seconds
        with suppress(ProcessLookupError):
            while self.process.exitcode is None and time.monotonic() < deadline:
                os.kill(self.process.pid, 0)  # raises where nobody has this pid any more
                time.sleep(0.005)
        return self.process.exitcode


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Have a process that is started here find a variable in its environment."""
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def _no_resource_tracker() -> Iterator[None]:
    """Start processes without multiprocessing's tracker of named memory: there is none here.

    The tracker outlives SIGTERM, and a kernel that is shut down waits seconds for it, is then
    killed, and cannot tidy up.
    """
    getfd = resource_tracker.getfd
    with open(os.devnull, "wb") as nowhere:
        resource_tracker.getfd = nowhere.fileno
        try:
            yield
        finally:
            resource_tracker.getfd = getfd


@contextmanager
def _empty_main_module() -> Iterator[None]:
    """Hide `__main__` from spawn, which would run the notebook's script again in each rank."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before
