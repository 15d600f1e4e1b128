"""The notebook's handle on one rank's process: send to it, receive from it, end it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol

from ddp_kit.error_text import Frame
from ddp_kit.errors import PoolError
from ddp_kit.pool.wire import payload
from ddp_kit.pool.wire.messages import RANK_MARK, Environment, FileStamp
from ddp_kit.pool.wire.output import RankOutput
from ddp_kit.trace import Board, stacks

# The beginnings of variables that PyTorch and its libraries read once, in a new process.
_READ_AT_START = (
    *("CUDA_", "GLOO_", "HIP_", "LD_LIBRARY_PATH", "MKL_", "NCCL_", "OMP_", "OPENBLAS_"),
    *("PYTORCH_", "ROCR_", "TORCH_"),
)


def start_variables() -> dict[str, str]:
    """Return the variables of this process's environment that matter when a rank starts."""
    return {name: os.environ[name] for name in os.environ if name.startswith(_READ_AT_START)}


class Ends(NamedTuple):
    """What the process of a rank is given: its ends of the pipes, its board, its mark."""

    control: Connection
    printed: Connection
    board: Board
    mark: str


class Process(Protocol):
    """A process: one of multiprocessing's, or one that a program has started for the pool."""

    pid: int
    sentinel: int  # a handle that becomes ready when it ends

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it runs."""


class RankHandle:
    """The process of one rank, its control pipe, its output and its board.

    start: starts a process with its ends of the pipes; returns it and what cleans up after it.

    Raises PoolError if no process can be started.
    """

    def __init__(self, start: Callable[[Ends], tuple[Process, Callable[[], None]]]) -> None:
        try:
            self.control, control_end = Pipe()
            printed, print_end = Pipe(duplex=False)
            self.board = Board()
            self._mark = uuid.uuid4().hex
            ends = Ends(control_end, print_end, self.board, self._mark)
            self.process, self._clean_up = start(ends)
        except OSError as error:
            raise PoolError(
                f"cannot start another process here ({error.strerror}); "
                "use a smaller world_size, or close pools that are not needed"
            ) from error
        self.output = RankOutput(printed)
        control_end.close()
        print_end.close()
        self.board.close_file()
        self._psutil = _find_process(self.process.pid)
        self.variables = start_variables()
        self.owed = 0  # replies that this rank has not sent yet
        self.cells_seen: set[str] = set()
        self.environment: Environment | None = None  # that it was sent last
        self.modules: dict[str, FileStamp] = {}  # the learner's files that it has imported
        self.notices: tuple[str, ...] = ()  # what this PyTorch does not support
        self._children: list = []

    @property
    def sentinel(self) -> int:
        """A handle that becomes ready when the process ends."""
        return self.process.sentinel

    def send(self, message: Any, encoded: bytes | None = None) -> None:
        """Send one message; a rank that has died is detected by its sentinel, not here."""
        self.owed += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            payload.send(self.control, message, encoded)

    def receive(self) -> Any:
        """Return the next reply, or None if the rank ended before it sent one."""
        try:
            reply = payload.receive(self.control)
        except (EOFError, OSError, RuntimeError, UnpicklingError):
            return None  # it ended, perhaps while it sent a reply
        self.owed -= 1
        self.modules |= reply.status.modules
        self.notices = reply.status.notices or self.notices
        return reply

    def stacks(self) -> list[list[Frame]]:
        """Ask the rank which lines its threads run; the main thread's come first.

        Return an empty list if there was no answer.
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
        self.output.pipe.close()
        self.board.close()
        self._clean_up()

    def dismiss(self) -> None:
        """Ask the process to exit; remember its children, who are hard to find without it."""
        if not self.control.closed:
            self._children = _descendants(self._psutil) if self.alive else _marked(self._mark)
        self.control.close()

    def kill(self) -> None:
        """End the process and its children at once."""
        import psutil

        self._children += _descendants(self._psutil)
        for process in [self._psutil, *self._children]:
            with suppress(psutil.Error, AttributeError):
                process.kill()

    def join(self, seconds: float) -> int | None:
        """Wait for the process to end; return its exit code.

        None: it has not ended, or other code in this process has fetched its exit code.
        `Process.join` would wait for the sentinel, which a grandchild may keep open.
        """
        deadline = time.monotonic() + seconds
        with suppress(ProcessLookupError):
            while self.process.exitcode is None and time.monotonic() < deadline:
                os.kill(self.process.pid, 0)  # raises once nobody has this pid any more
                time.sleep(0.005)
        return self.process.exitcode


# psutil is imported on first use, because a rank does not need it.


def _find_process(pid: int | None) -> Any:
    """Return a handle that is not confused by a later process with the same pid."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def _descendants(process: Any) -> list:
    """Return the processes below this one, as far as they are visible."""
    import psutil

    try:
        return process.children(recursive=True)
    except (psutil.Error, OSError, AttributeError):
        return []


def kill_marked(mark: str) -> None:
    """End every process with this mark in its environment."""
    import psutil

    for process in _marked(mark):
        with suppress(psutil.Error):
            process.kill()


def _marked(mark: str) -> list:
    """Return what a rank that has ended left running: it is nobody's child now."""
    import psutil

    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(RANK_MARK) == mark:
                left.append(process)
    return left
