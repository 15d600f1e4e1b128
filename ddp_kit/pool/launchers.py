"""How the processes of ranks are started: by spawn, one by one, or by a program such as mpiexec.

A further launcher is one more class: a `Launcher` that starts processes itself, or a `Program`
whose processes connect to a socket and become ranks (`rank.bootstrap.serve_connected`). That of
torchrun is in `torchrun.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, resource_tracker
from pathlib import Path

import torch.multiprocessing as mp

from ddp_kit.backends import mpi
from ddp_kit.errors import BackendError, KitError, PoolError
from ddp_kit.pool.interrupts import holding_interrupt
from ddp_kit.pool.private_folder import PrivateFolder
from ddp_kit.pool.rank import bootstrap, mpiexec_main
from ddp_kit.pool.rank_handle import Ends, Process, RankHandle, stop_ranks
from ddp_kit.pool.wire.messages import CALL, RANK_MARK

FIRST = Path(bootstrap.__file__).with_name("without_gc.py")  # what each rank executes first
CONNECT_TIMEOUT = 60.0  # seconds until all processes of mpiexec must have connected
KEPT = 8000  # bytes of a program's output that are read at its beginning and at its end
PATIENCE = 2.0  # seconds for a program to end and to remove its files
LONGEST_PATH = 100  # bytes in the path of a socket; some systems allow a few more

_PREFIX = re.compile(r"^\[[WE][^\]]*\] (\[c10d\] )?")  # of a line that C++ logs
_RAISED = re.compile(r"([\w.]*\.)?(?=\w*(Error|Exception): )")


Show = Callable[[list[str]], None]  # is called with what each process is doing, again and again


class Launcher:
    """Starts the processes of a pool's ranks."""

    hosts = 1  # on which it starts ranks; this process sees those of its own host
    store: tuple[str, int] | None = None  # address and port of what all hosts share, if several
    reusable = True  # its ranks serve one run after another
    separate = False  # its ranks can end one by one

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


def was_ended_by_launcher(process: Process) -> bool:
    """Return whether the launcher ended a process because another one had ended."""
    return getattr(process, "was_ended_by_launcher", False)


def why_not_ready(process: Process) -> str:
    """Return what the launcher's program printed about ranks that never came; "" if nothing."""
    return getattr(process, "why_not_ready", str)()


# --- spawn -----------------------------------------------------------------------------------


class Spawn(Launcher):
    """Starts each process by itself, so that one can be replaced, added or left out."""

    separate = True

    def provide(self, ranks: list[RankHandle], world_size: int, broken: bool) -> bool:
        # One that owes a reply may wait for the dead one in the group they were to form, or run a
        # worker that a second interrupt has left behind.
        unusable = [n for n, rank in enumerate(ranks) if broken and (rank.owed or not rank.alive)]
        stop_ranks([ranks[number] for number in unusable])
        for number in unusable:
            ranks[number] = RankHandle(_spawn)
        new = bool(unusable) or len(ranks) < world_size
        while len(ranks) < world_size:
            ranks.append(RankHandle(_spawn))
        return new


def _spawn(ends: Ends) -> tuple[Process, Callable[[], None]]:
    with (
        holding_interrupt(),
        _main_module(FIRST),
        _no_resource_tracker(),
        _variable(RANK_MARK, ends.mark),
    ):
        args = ends.control, ends.printed, ends.board, os.getpid()
        started = mp.spawn(bootstrap.serve_spawned, args, nprocs=1, join=False)
    # torch writes these if `serve_spawned` fails.
    return started.processes[0], partial(_remove, getattr(started, "error_files", ()))


def _remove(files: Sequence[str]) -> None:
    for file in files:
        Path(file).unlink(missing_ok=True)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable for the processes that are started in this block."""
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def _no_resource_tracker() -> Iterator[None]:
    """Start processes without multiprocessing's tracker of named memory, which is not used here.

    The tracker outlives SIGTERM, and a kernel that is shut down waits seconds for it, is then
    killed, and cannot clean up.
    """
    getfd = resource_tracker.getfd
    with open(os.devnull, "wb") as nowhere:
        resource_tracker.getfd = nowhere.fileno
        try:
            yield
        finally:
            resource_tracker.getfd = getfd


@contextmanager
def _main_module(file: Path) -> Iterator[None]:
    """Let spawn run `file` first in each rank, and not the notebook's script again."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__file__ = str(file)
    try:
        yield
    finally:
        sys.modules["__main__"] = before


# --- programs that start ranks ---------------------------------------------------------------

# The program must end with this process, even if that is killed. The ranks watch for it too.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Program:
    """A program, such as mpiexec, that starts one process for each rank, which takes seconds.

    It passes no pipes on, so its processes connect to a socket and are sent theirs. They live and
    die together, and none can be added.

    count: number of processes that connect. path: of the socket. command: starts the program.
    environment: the program's. To be created while interrupts are held, because the program
    inherits a blocked SIGINT.

    Raises PoolError if it cannot be started.
    """

    name: str
    start_error: type[KitError]  # raised if its processes do not come

    def __init__(
        self, count: int, path: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise PoolError(
                f"the name of the temporary folder is too long for a socket in it ({path!r}); "
                "set TMPDIR to a folder with a shorter name"
            )
        self.count = count
        self._path = path
        self._lines: list[socket.socket] = []
        self._attempt = 0
        self._calls: list[tuple[int, int, socket.socket]] = []  # rank, process id, connection
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self._last = ""  # what the program had printed when it was ended
        self._first: tuple[int | None, int | None] | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": self._printed, "stderr": self._printed}
        watched = [sys.executable, "-c", _END_WITH_PARENT, *command]
        try:
            self._listener.bind(path)
            self._listener.listen(count)
            self._program = subprocess.Popen(watched, env=dict(environment), **pipes)
        except OSError as error:
            self.close_listener()
            self._printed.close()
            raise PoolError(f"{self.name} cannot be started here ({error.strerror})") from error

    @property
    def all_connected(self) -> bool:
        return len(self._calls) == self.count

    def wait(self, seconds: float, show: Show) -> None:
        """Wait until all processes have connected; any exception ends them.

        Raises `start_error`, with the program's own words, if they have not after `seconds`.
        """
        deadline = time.monotonic() + seconds
        try:
            while not self.all_connected:
                if self.ended or time.monotonic() > deadline:
                    raise self.start_error(self.explain_start(seconds))
                if connection.wait([self._listener], 0.1):
                    self._accept()
                ready = {rank for rank, *_ in self._calls}
                starting = f"starting under {self.name}"
                show(["ready" if n in ready else starting for n in range(self.count)])
        except BaseException:
            self.end()
            raise

    def explain_start(self, seconds: float) -> str:
        return f"{self.name} did not start {self.count} ranks: {self.in_one_line()}"

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        self._lines.append(line)
        line.settimeout(PATIENCE)  # what it sends is on its way already
        with suppress(TimeoutError):
            call = line.recv(CALL.size, socket.MSG_WAITALL)
            if len(call) == CALL.size:  # else it ended, which the program will report
                attempt, rank, pid = CALL.unpack(call)
                if attempt != self._attempt:  # the program has restarted all of them
                    self._attempt, self._calls = attempt, []
                self._calls.append((rank, pid, line))

    def admit(self) -> list[RankHandle]:
        return [self._admit(*call) for call in sorted(self._calls)]

    def _admit(self, rank: int, pid: int, line: socket.socket) -> RankHandle:
        def start(ends: Ends) -> tuple[_ConnectedProcess, Callable[[], None]]:
            descriptors = [ends.control.fileno(), ends.printed.fileno(), ends.board.fileno()]
            with suppress(BrokenPipeError, ConnectionResetError):  # its exit code will explain
                socket.send_fds(line, [ends.mark.encode()], descriptors)
            return _ConnectedProcess(self, rank, pid, line), self.on_rank_stopped

        return RankHandle(start)

    def on_rank_stopped(self) -> None:
        """React to the end of a rank; called once for each rank that is stopped."""

    def close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def printed(self) -> str:
        """Return the beginning and the end of what the program has printed."""
        if self._printed.closed:
            return self._last
        # Not by seek: the program writes at this file's position.
        file = self._printed.fileno()
        size = os.fstat(file).st_size
        if size <= 2 * KEPT:
            return os.pread(file, size, 0).decode(errors="replace")
        ends = os.pread(file, KEPT, 0), os.pread(file, KEPT, size - KEPT)
        return "\n".join(end.decode(errors="replace") for end in ends)

    def in_one_line(self) -> str:
        if self._printed.closed:
            return "it was ended"
        lines = self.printed()[:4000].splitlines()
        text = " ".join(line.strip(" -") for line in lines if line.strip(" -"))
        return text or "it printed nothing"

    def reason(self) -> str:
        """Return the last error that was printed, in one line; "" if there is none."""
        lines = [_PREFIX.sub("", line) for line in self.printed().splitlines()]
        raised = [_RAISED.sub("", line, count=1) for line in lines if _RAISED.match(line)]
        errors = raised or [line for line in lines if line.startswith("The ")]
        return errors[-1].partition(" - retrying")[0][:300].rstrip(".") if errors else ""

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def ended(self) -> bool:
        """Whether the program was ended from here, or has ended by itself."""
        return self._printed.closed or self._program.poll() is not None

    def first_end(self) -> tuple[int | None, int | None]:
        """Return which rank ended first, and its exit code or minus its signal.

        None: the program does not report it.
        """
        raise NotImplementedError

    def leave(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._program.wait(seconds)

    def end(self) -> None:
        """End all processes, which see that their connection ends; then the program.

        The program is asked first, because it has files to remove.
        """
        self.close_listener()
        if self._printed.closed:
            return
        for line in self._lines:
            line.close()
        self._program.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._program.wait(PATIENCE)
        self._program.kill()
        self._program.wait()
        self._last = self.printed()
        self._printed.close()


class _ConnectedProcess:
    """A process of a program. It cannot be waited for here, because it is the program's child."""

    def __init__(self, program: Program, rank: int, pid: int, line: socket.socket) -> None:
        self.pid, self.sentinel, self.launcher = pid, line.fileno(), program.pid
        self._program, self._rank, self._line = program, rank, line
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        if self._code is None and self._line.fileno() < 0:
            self._code = -signal.SIGKILL  # the program was ended from here
        elif self._code is None and (connection.wait([self._line], 0) or self._program.ended):
            _, code = self._program.first_end()
            self._code = 1 if code is None else code
        return self._code

    def why_not_ready(self) -> str:
        return self._program.reason()

    @property
    def was_ended_by_launcher(self) -> bool:
        return self._program.first_end()[0] not in (None, self._rank)


# --- mpiexec ---------------------------------------------------------------------------------

# How Open MPI names the process that ended first: after a signal, with an exit code, with 0.
_SIGNAL = re.compile(r"process rank (\d+) with PID .* on signal (\d+)")
_CODE = re.compile(r"Process name: \[\S*,(\d+)\] Exit code: +(\d+)")
_LEFT = re.compile(r"process rank (\d+) with PID .* exiting improperly")


class MPIExec(Launcher):
    """Starts all processes with one mpiexec, which can neither replace nor add one later."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._program: MPIExecProgram | None = None
        self._size = 0  # of the last job whose processes connected

    def provide(self, ranks: list[RankHandle], world_size: int, broken: bool) -> bool:
        """Start a new job if this one is broken or too small; return its processes after `wait`."""
        size = max(world_size, self._size)
        broken = broken and any(rank.owed or not rank.alive for rank in ranks)
        program = self._program
        if program is None or program.ended or size > program.count or broken:
            stop_ranks(ranks)
            ranks.clear()
            if program is not None:
                program.end()
            program = self._program = MPIExecProgram(size, self._folder.socket)
        if ranks or not program.all_connected:
            return False
        ranks += program.admit()
        self._size = size
        return True

    def wait(self, show: Show) -> None:
        """Wait for the processes. Raise BackendError with mpiexec's output if they do not start."""
        assert self._program is not None, "provide has started it"
        self._program.wait(CONNECT_TIMEOUT, show)
        self._program.close_listener()

    def end(self) -> None:
        self._size = 0
        if self._program is not None:
            self._program.end()


class MPIExecProgram(Program):
    """One mpiexec. It ends all of its processes when one has ended."""

    name = "mpiexec"
    start_error = BackendError

    def __init__(self, world_size: int, path: str) -> None:
        passed = json.dumps([sys.path, sys.argv, CALL.format])
        script = [sys.executable, mpiexec_main.__file__, path, passed]
        command = [*mpi.mpiexec(world_size), *script]
        super().__init__(world_size, path, command, os.environ | mpi.environment())

    def on_rank_stopped(self) -> None:
        self.end()

    def first_end(self) -> tuple[int | None, int | None]:
        """Return which rank ended first, and how, as Open MPI prints when it ends."""
        if self._first is None:
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(PATIENCE)
            self._first = self._parse_first()
        return self._first

    def _parse_first(self) -> tuple[int | None, int | None]:
        text = self.in_one_line()
        for pattern, sign in ((_SIGNAL, -1), (_CODE, 1)):
            if found := pattern.search(text):
                return int(found[1]), sign * int(found[2])
        found = _LEFT.search(text)
        return (int(found[1]), 0) if found else (None, None)
