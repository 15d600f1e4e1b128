"""The processes of a pool's ranks, and the process group that they form.

RankHandle     one rank's process: send to it, receive from it, end it
Launcher       who starts the processes
RankProcesses  the ranks of a pool: which are missing, replaced, or restarted for a changed file
"""

from __future__ import annotations

import linecache
import os
import sys
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pickle import UnpicklingError
from typing import Any, ClassVar, NamedTuple, Protocol

import psutil

from ddp_kit.error_text import Frame, name_ranks
from ddp_kit.errors import KitError, PoolError
from ddp_kit.pool import ipython, live_view
from ddp_kit.pool.interrupts import holding_interrupt
from ddp_kit.pool.private_folder import PrivateFolder
from ddp_kit.pool.wire import pickling
from ddp_kit.pool.wire.messages import (
    RANK_MARK,
    CallWorker,
    Environment,
    FileStamp,
    JoinGroup,
    file_stamp,
)
from ddp_kit.pool.wire.output import RankOutput, drain
from ddp_kit.pool.wire.pickling import Payload
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
        self.psutil: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self.psutil = psutil.Process(self.process.pid)  # no later process with this pid
        self.variables = start_variables()
        self.owed = 0  # replies that this rank has not sent yet
        self.cells_seen: set[str] = set()
        self.environment: Environment | None = None  # that it was sent last
        self.modules: dict[str, FileStamp] = {}  # the learner's files that it has imported

    def send(self, message: Any) -> None:
        """Send one message; a rank that has died is detected by its sentinel, not here."""
        self.owed += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            pickling.send(self.control, message)

    def receive(self) -> Any:
        """Return the next reply, or None if the rank ended before it sent one."""
        try:
            reply = pickling.receive(self.control)
        except (EOFError, OSError, RuntimeError, UnpicklingError):
            return None  # it ended, perhaps while it sent a reply
        self.owed -= 1
        self.modules |= reply.status.modules
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
        while self.process.exitcode is None and time.monotonic() < deadline:
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
    children = started_by(ranks)  # hard to find once their rank has left
    for rank in ranks:
        rank.control.close()
    leaving = [rank for rank in ranks if not rank.owed] if patience > 0 else []
    deadline = time.monotonic() + patience
    for rank in leaving:
        rank.join(deadline - time.monotonic())
    if leaving:
        children += started_by(ranks)  # which they have started meanwhile
    kill([*(rank.psutil for rank in ranks), *children])
    for rank in ranks:
        rank.join(5)
        rank.release()


def kill(processes: Iterable[psutil.Process | None]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            if process is not None:
                process.kill()


def kill_marked(mark: str) -> None:
    kill(_find([], {mark}))


def started_by(ranks: Iterable[RankHandle]) -> list[psutil.Process]:
    """Return the processes that ranks have started, as far as they are visible.

    They are below the ranks. What a rank that has ended left running is nobody's child now, but it
    has the rank's mark.
    """
    running = [rank.psutil.pid for rank in ranks if rank.psutil and rank.psutil.is_running()]
    return _find(running, {rank.mark for rank in ranks})


def _find(pids: list[int], marks: Container[str]) -> list[psutil.Process]:
    """Return the processes below these, and those with a mark, in one scan of all processes."""
    found, children = [], defaultdict(list)
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            children[process.ppid()].append(process)
            if process.environ().get(RANK_MARK) in marks:
                found.append(process)
    below = list(pids)
    for pid in below:
        processes = children.pop(pid, [])
        found += processes
        below += [process.pid for process in processes]
    return found


Show = Callable[[list[str]], None]  # is called with what each process is doing, again and again


class Launcher:
    """Starts the processes of a pool's ranks."""

    hosts = 1  # on which it starts ranks; this process sees those of its own host
    store: tuple[str, int] | None = None  # address and port of what all hosts share, if several
    reusable = True  # its ranks serve one run after another

    def provide(self, ranks: list[RankHandle], world_size: int, broken: bool) -> bool:
        """Put at least `world_size` living processes into `ranks`; return whether some are new.

        A launcher that takes its time leaves `ranks` as they are until `wait` has been called.

        broken: some may have ended, or owe a reply that nobody waits for.
        """
        raise NotImplementedError

    def wait(self, show: Show) -> None:
        """Wait until the processes exist. An interrupt or an error ends them."""

    def end(self) -> None:
        """End what is left when the processes have ended."""


class RankProcesses:
    """The ranks of one pool: started when they are missing, replaced when they are broken.

    launcher: starts them. folder: where their stores are; it is removed by `end(remove=True)`.
    init: False leaves it to the worker to form a group.
    """

    ever_created: ClassVar[bool] = False  # in this process

    def __init__(self, launcher: Launcher, folder: PrivateFolder, init: bool = True) -> None:
        self.ranks: list[RankHandle] = []
        self.launcher, self.folder = launcher, folder
        self.notified: set[str] = set()  # lines that a learner needs to see once
        self._init = init
        self._groups = 0
        self._formed: tuple[int, str] | None = None  # the group that the ranks were asked to form
        self._lost: tuple[int, str] | None = None  # the group that a failed run has left broken
        self._in_run = False  # a worker was sent; a rank that still owes a reply may be in it
        self.is_used = False  # a worker was ever sent
        self._used = time.monotonic()  # when ranks were started, or the last run ended
        self.has_names = False  # of `%%ranks` cells, which end with the ranks
        _all.add(self)
        RankProcesses.ever_created = True

    @property
    def backend(self) -> str | None:
        """The backend of the group that the ranks were asked to form; None if there is none."""
        return self._formed[1] if self._formed else None

    def get_ready(self, world_size: int, backend: str, show: Show) -> None:
        """Start what is missing of `world_size` ranks, and ask them to form a group.

        show: is called with what each rank is doing while a launcher takes its time.

        Raises BackendError or PoolError if they cannot be started.
        """
        if self._has_formed(world_size, backend) and all(rank.alive for rank in self.ranks):
            return  # nearly always
        with holding_interrupt():
            self.form(world_size, backend)
        if len(self.ranks) < world_size:  # a launcher that takes its time may be interrupted
            self.launcher.wait(show)
            with holding_interrupt():
                self.form(world_size, backend)
        if len(self.ranks) < world_size:
            raise PoolError("the ranks ended before they were ready; try again")

    def form(self, world_size: int, backend: str, join: bool = True) -> None:
        """Ask `world_size` living processes to form a group, unless they have one.

        Processes that the launcher has not started yet are left to the next call. join: False only
        starts processes.
        """
        if _leaving:
            return
        self._lost = None
        broken = self._in_run or not all(rank.alive for rank in self.ranks)
        if broken:
            self._formed, self._in_run = None, False
        if self.launcher.provide(self.ranks, world_size, broken):
            self._formed, self._used = None, time.monotonic()
        if not join or len(self.ranks) < world_size or self._has_formed(world_size, backend):
            return
        self._groups += 1
        store = self.folder.file(self._groups) if self._init else None
        for number, rank in enumerate(self.ranks[:world_size]):
            rank.send(JoinGroup(number, world_size * self.launcher.hosts, backend, store))
        self._formed = (world_size, backend)

    def _has_formed(self, world_size: int, backend: str) -> bool:
        return self._formed == (world_size, backend) and not self._in_run

    def call_worker(
        self, ranks: list[RankHandle], packed: Payload, environment: Environment, number: int
    ) -> None:
        """Ask these ranks to call the worker in `packed`, which is closed."""
        self._in_run = self.is_used = True
        drain([rank.output for rank in ranks])
        cells = ipython.cell_names()
        for rank in ranks:
            rank.output.take()  # what was printed between two runs belongs to none
            unseen = cells.keys() - rank.cells_seen
            new = {name: "".join(linecache.getlines(name)) for name in unseen}
            changed = None if environment == rank.environment else environment
            rank.send(CallWorker(packed, new, changed, number))
            rank.cells_seen |= new.keys()
            rank.environment = environment
        packed.close()

    def end_run(self, intact: bool) -> None:
        """Record that a run is over, and that ranks which owed a reply were stopped.

        intact: the group is unchanged. Else the next run forms it again. In a notebook that happens
            already while the learner reads the error, which comes first: many ranks take seconds.
        """
        self._in_run, self._used = False, time.monotonic()
        if self.launcher.reusable and self._formed and not intact:
            self._lost, self._formed = self._formed, None
            ipython.after_cell(self._form_lost)

    def _form_lost(self) -> None:
        """Form the group that a run has lost, unless another run has, or the pool was closed."""
        if self._lost:
            # The next run tries again, and reports what goes wrong.
            with suppress(KitError, KeyboardInterrupt), holding_interrupt():
                self.form(*self._lost)

    def restart_changed(self, world_size: int) -> None:
        """End the ranks that have imported a file which has changed since.

        A deleted file has not changed: nothing newer could be imported.
        """
        old: dict[int, set[str]] = {}
        for number, rank in enumerate(self.ranks[:world_size]):
            stamps = rank.modules.items()
            if stale := {file for file, stamp in stamps if file_stamp(file) not in (None, stamp)}:
                old[number] = stale
        if old:
            with holding_interrupt():
                stop_ranks([self.ranks[number] for number in old])
            changed = set().union(*old.values())
            names = " and ".join(sorted({os.path.basename(file) for file in changed}))
            live_view.say(f"{names} changed on disk: restarting {name_ranks(old)}")

    def end_unused(self, seconds: float) -> float | None:
        """End the ranks if no run has used them for so many seconds, and they hold no names.

        Return in how many seconds to look again; None: no rank is left, or they hold names.
        """
        left = seconds - (time.monotonic() - self._used)
        if left > 0:
            return left
        if not self.has_names:
            self.end()
        return None

    def dismiss(self, patience: float) -> None:
        """Ask the ranks to leave; kill those that have not within `patience` seconds."""
        ranks, self.ranks, self._formed, self._lost = self.ranks, [], None, None
        self.has_names = False
        stop_ranks(ranks, patience)

    def end(self, remove: bool = False) -> None:
        """End every process. remove: remove the folder, too."""
        try:
            self.dismiss(patience=1.0)
            self.launcher.end()
        finally:
            if remove:
                self.folder.remove()


_all: weakref.WeakSet[RankProcesses] = weakref.WeakSet()
_leaving = False  # the notebook's kernel is about to end


def end_all(leaving: bool) -> None:
    """End the ranks of every pool, because this process is about to end; False: it stays.

    A kernel that shuts down sends its children SIGTERM and waits until they are reaped, which
    nobody would do: its main thread is idle or in a run. May be called in any thread.
    """
    global _leaving
    _leaving = leaving
    pools = list(_all) if leaving else []
    ranks = [rank for processes in pools for rank in list(processes.ranks)]
    kill([*(rank.psutil for rank in ranks), *started_by(ranks)])
    for rank in ranks:
        rank.join(1)
    for processes in pools:
        processes.launcher.end()


def current_environment() -> Environment:
    """Return what a rank takes over from this process. Raise PoolError if its folder is gone."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise PoolError(
            "the notebook's working directory no longer exists; os.chdir to one that does"
        ) from None
    path, variables = tuple(map(str, sys.path)), dict(os.environ)
    in_notebook = live_view.current.show_displayed is not None
    return Environment(
        path, folder, _argv(in_notebook), variables, in_notebook, live_view.is_live()
    )


def _argv(in_notebook: bool) -> tuple[str, ...]:
    """Return sys.argv; that of an interactive Python if it is as the kernel was started."""
    given = len(sys.argv) - 1
    if in_notebook and sys.argv[1:] == sys.orig_argv[len(sys.orig_argv) - given :]:
        return ("",)
    return tuple(map(str, sys.argv))
