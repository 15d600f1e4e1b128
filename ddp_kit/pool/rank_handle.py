"""The notebook's handle on one rank's process: send to it, receive from it, end it."""

from __future__ import annotations

import os
import selectors
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
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
# Seconds in which the exit code of a process that is gone may still arrive: another thread or a
# fork server may have fetched it, and not yet passed it on.
_GRACE = 0.5


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
            self.mark = uuid.uuid4().hex
            ends = Ends(control_end, print_end, self.board, self.mark)
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
        self.psutil = _find_process(self.process.pid)
        self.variables = start_variables()
        self.owed = 0  # replies that this rank has not sent yet
        self.cells_seen: set[str] = set()
        self.environment: Environment | None = None  # that it was sent last
        self.modules: dict[str, FileStamp] = {}  # the learner's files that it has imported
        self.notices: tuple[str, ...] = ()  # what this PyTorch does not support
        self.used = time.monotonic()  # when it was started, or its last run ended
        self.has_names = False  # of `%%ranks` cells, which end with it

    @property
    def sentinel(self) -> int:
        return self.process.sentinel

    def send(self, message: Any) -> None:
        """Send one message; a rank that has died is detected by its sentinel, not here."""
        self.owed += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            payload.send(self.control, message)

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

    @property
    def alive(self) -> bool:
        """Whether the process runs and can be talked to."""
        return not self.control.closed and self.process.exitcode is None and self._exists()

    def _exists(self) -> bool:
        """Return whether there is such a process; other code may have fetched its exit code."""
        try:
            os.kill(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def join(self, seconds: float) -> int | None:
        """Wait for the process to end; return its exit code.

        None: it has not ended, or other code in this process has fetched its exit code.
        `Process.join` would wait for the sentinel, which a grandchild may keep open.
        """
        deadline = time.monotonic() + seconds
        ended = False
        while self.process.exitcode is None and time.monotonic() < deadline:
            if not ended and not self._exists():
                ended, deadline = True, min(deadline, time.monotonic() + _GRACE)
            time.sleep(0.005)
        return self.process.exitcode

    def release(self) -> None:
        """Close what belonged to the process, which has ended."""
        self.output.pipe.close()
        self.board.close()
        self._clean_up()
        self.modules.clear()

    @property
    def is_released(self) -> bool:
        return self.output.pipe.closed


class Sources:
    """What can come from these ranks: a reply, what they print, or their end."""

    def __init__(self, ranks: list[RankHandle], numbers: Collection[int]) -> None:
        self._selector = selectors.PollSelector()
        self._descriptors: dict[tuple[int, str], int] = {}
        for number in numbers:
            rank = ranks[number]
            self._add(number, "reply", rank.control.fileno())
            self._add(number, "end", rank.sentinel)
            if rank.output.is_open:
                self._add(number, "output", rank.output.pipe.fileno())

    def _add(self, number: int, what: str, descriptor: int) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, (number, what))
        self._descriptors[number, what] = descriptor

    def wait(self, seconds: float) -> list[tuple[int, str]]:
        return [key.data for key, _ in self._selector.select(seconds)]

    def remove(self, number: int, *whats: str) -> None:
        """Stop listening to a rank, or only for some of what can come from it."""
        for what in whats or ("reply", "end", "output"):
            if (number, what) in self._descriptors:
                self._selector.unregister(self._descriptors.pop((number, what)))


# What several ranks are asked for or must do happens at the same time: one after the other, the
# last of many would have to wait for all others, and each would need a scan of all processes.


def ask_for_stacks(ranks: Sequence[RankHandle]) -> list[list[list[Frame]]]:
    """Ask ranks which lines their threads run; return it by rank, the main thread's lines first.

    A rank that did not answer has an empty list.
    """
    readers = {rank.process.pid: rank.board.read_stacks for rank in ranks}
    return [stacks.parse(answer) for answer in stacks.ask(readers)]


def stop_ranks(ranks: Sequence[RankHandle], patience: float = 0.0) -> None:
    """End the processes of ranks, and their children. Stopping a rank twice does nothing.

    patience: seconds for them to leave by themselves before they are killed. A rank that owes a
        reply is busy, or has not even started: it is not waited for.
    """
    ranks = [rank for rank in ranks if not rank.is_released]
    if not ranks:
        return
    children = _started_by(ranks)  # hard to find once their rank has left
    for rank in ranks:
        rank.control.close()
    leaving = [rank for rank in ranks if not rank.owed] if patience > 0 else []
    deadline = time.monotonic() + patience
    for rank in leaving:
        rank.join(deadline - time.monotonic())
    if leaving:
        children += _started_by(ranks)  # which they have started meanwhile
    _kill(ranks, children)
    for rank in ranks:
        rank.join(5)
        rank.release()


def kill_ranks(ranks: Sequence[RankHandle]) -> None:
    """Send SIGKILL to the processes of ranks and to their children."""
    _kill(ranks, _started_by(ranks))


def _kill(ranks: Sequence[RankHandle], children: Iterable) -> None:
    import psutil

    for process in [*(rank.psutil for rank in ranks), *children]:
        with suppress(psutil.Error, AttributeError):
            process.kill()


# psutil is imported on first use, because a rank does not need it.


def _find_process(pid: int | None) -> Any:
    """Return a handle that is not confused by a later process with the same pid."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def _started_by(ranks: Iterable[RankHandle]) -> list:
    """Return the processes that ranks have started, as far as they are visible.

    They are below the ranks. What a rank that has ended left running is nobody's child now, but it
    has the rank's mark.
    """
    running = [rank.psutil for rank in ranks if rank.psutil and rank.psutil.is_running()]
    return _find([process.pid for process in running], {rank.mark for rank in ranks})


def have_processes(ranks: Sequence[RankHandle]) -> bool:
    """Return whether ranks have started processes that still run."""
    import psutil

    own = {rank.process.pid for rank in ranks}
    for process in _started_by(ranks):
        with suppress(psutil.Error):  # one that has ended may wait to be reaped
            if process.pid not in own and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def kill_marked(mark: str) -> None:
    import psutil

    for process in _find([], {mark}):
        with suppress(psutil.Error):
            process.kill()


def _find(pids: list[int], marks: Container[str]) -> list:
    """Return the processes below these, and those with a mark, in one scan of all processes."""
    import psutil

    found, children = [], defaultdict(list)
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)  # not confused by a later process with the same pid
            children[process.ppid()].append(process)
            if process.environ().get(RANK_MARK) in marks:
                found.append(process)
    below = list(pids)
    for pid in below:
        processes = children.pop(pid, [])
        found += processes
        below += [process.pid for process in processes]
    return found
