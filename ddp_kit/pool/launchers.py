"""How the processes of ranks are started: by spawn, one by one, or by a program such as mpiexec.

A further launcher is one more class: a `Launcher` that starts processes itself, or a `Program`
whose processes connect to a socket and become ranks (`rank.bootstrap.serve_connected`). That of
torchrun is in `torchrun.py`.
"""

from __future__ import annotations

import json
import multiprocessing
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
from multiprocessing import connection, resource_tracker
from pathlib import Path

from ddp_kit import settings
from ddp_kit.backends import mpi
from ddp_kit.errors import BackendError, KitError, PoolError
from ddp_kit.pool.interrupts import holding_interrupt
from ddp_kit.pool.private_folder import PrivateFolder
from ddp_kit.pool.rank import bootstrap
from ddp_kit.pool.ranks import Ends, Launcher, Process, RankHandle, Show, stop_ranks
from ddp_kit.pool.wire.messages import CALL, RANK_MARK

FIRST = Path(bootstrap.__file__).with_name("without_gc.py")  # what each rank executes first
NewProcess = multiprocessing.get_context("spawn").Process
PATIENCE = 10.0  # seconds for a program to end and to remove its files

_PREFIX = re.compile(r"^\[[WE][^\]]*\] (\[c10d\] )?")  # of a line that C++ logs
_RAISED = re.compile(r"([\w.]*\.)?(?=\w*(Error|Exception): )")


# --- spawn -----------------------------------------------------------------------------------


class Spawn(Launcher):
    """Starts each process by itself, so that one can be replaced, added or left out."""

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
    with holding_interrupt(), _prepared_for_spawn(ends.mark):
        args = ends.control, ends.printed, ends.board, os.getpid()
        process = NewProcess(target=bootstrap.serve_spawned, args=args)
        process.start()
    return process, lambda: None


@contextmanager
def _prepared_for_spawn(mark: str) -> Iterator[None]:
    """Let a rank have its mark, and run FIRST instead of the notebook's script.

    It has no tracker of named memory of multiprocessing's, which the kit does not use: the tracker
    outlives SIGTERM, and a kernel that is shut down waits seconds for it, is then killed, and
    cannot clean up.
    """
    getfd, main = resource_tracker.getfd, sys.modules["__main__"]
    with open(os.devnull, "wb") as nowhere:
        try:
            os.environ[RANK_MARK] = mark
            resource_tracker.getfd = nowhere.fileno
            sys.modules["__main__"] = types.ModuleType("__main__")
            sys.modules["__main__"].__file__ = str(FIRST)
            yield
        finally:
            resource_tracker.getfd, sys.modules["__main__"] = getfd, main
            os.environ.pop(RANK_MARK, None)


# --- programs that start ranks ---------------------------------------------------------------

# The program must end with this process, even if that is killed. The ranks watch for it too.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Program(Launcher):
    """A program, such as mpiexec, that starts one process for each rank, which takes seconds.

    It passes no pipes on, so its processes connect to a socket and are sent theirs. They live and
    die together, and none can be added.

    count: number of processes that connect. path: of the socket. command: starts the program.
    environment: the program's. timeout: seconds for all to connect. To be created while interrupts
    are held, because the program inherits a blocked SIGINT.

    Raises PoolError if it cannot be started.
    """

    name: str
    start_error: type[KitError]  # raised if its processes do not come

    def __init__(
        self,
        count: int,
        path: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout: float,
    ) -> None:
        self.count, self._path, self._timeout = count, path, timeout
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
            why = error.strerror or f"{error}; TMPDIR must be a folder with a shorter name"
            raise PoolError(f"{self.name} cannot be started here ({why})") from error

    def provide(self, ranks: list[RankHandle], world_size: int, broken: bool) -> bool:
        if ranks or not self.all_connected:
            return False
        ranks += [self._admit(*call) for call in sorted(self._calls)]
        return True

    def wait(self, show: Show) -> None:
        """Raise `start_error`, with the program's own words, if the processes do not come."""
        deadline = time.monotonic() + self._timeout
        try:
            while not self.all_connected:
                if self.ended or time.monotonic() > deadline:
                    raise self.start_error(self.explain_start())
                if connection.wait([self._listener], 0.1):
                    self._accept()
                ready = {rank for rank, *_ in self._calls}
                starting = f"starting under {self.name}"
                show(["ready" if n in ready else starting for n in range(self.count)])
        except BaseException:
            self.end()
            raise

    @property
    def all_connected(self) -> bool:
        return len(self._calls) == self.count

    def explain_start(self) -> str:
        return f"{self.name} did not start {self.count} ranks: {self.words() or 'it was silent'}"

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        line.settimeout(PATIENCE)  # what it sends is on its way already
        with suppress(TimeoutError):
            call = line.recv(CALL.size, socket.MSG_WAITALL)
            if len(call) == CALL.size:  # else it ended, which the program will report
                self._calls.append((*CALL.unpack(call), line))

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
        if self._printed.closed:
            return self._last
        # Not by seek: the program writes at this file's position.
        file = self._printed.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def words(self) -> str:
        """Return the beginning of what was printed, in one line."""
        return " ".join(re.sub("--+", "", self.printed()[:4000]).split())

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
        for *_, line in self._calls:
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
    def was_ended_later(self) -> bool:
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
            program = self._program = MPIExecProgram(size, self._folder.file("socket"))
        are_new = program.provide(ranks, size, broken)
        self._size = size if are_new else self._size
        return are_new

    def wait(self, show: Show) -> None:
        assert self._program is not None, "provide has started it"
        self._program.wait(show)
        self._program.close_listener()

    def end(self) -> None:
        self._size = 0
        if self._program is not None:
            self._program.end()


# What mpiexec runs. It connects at once, before large imports: the pool must know of all ranks when
# one of them cannot load MPI, because mpiexec then ends the others.
_BECOME_RANK = (
    "import json, os, socket, struct, sys; "
    "line = socket.socket(socket.AF_UNIX); line.connect(sys.argv[1]); "
    "sys.path[:], sys.argv[:], call = json.loads(sys.argv[2]); "
    "names = 'OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK'; "
    "rank = next(int(os.environ[name]) for name in names if name in os.environ); "
    "line.sendall(struct.pack(call, rank, os.getpid())); "
    "from ddp_kit.pool.rank import bootstrap; bootstrap.serve_under_mpiexec(line)"
)


class MPIExecProgram(Program):
    """One mpiexec. It ends all of its processes when one has ended."""

    name = "mpiexec"
    start_error = BackendError

    def __init__(self, world_size: int, path: str) -> None:
        script = [sys.executable, "-c", _BECOME_RANK, path]
        script.append(json.dumps([sys.path, sys.argv, CALL.format]))
        command = [*mpi.mpiexec(world_size), *script]
        environment = os.environ | mpi.environment()
        super().__init__(world_size, path, command, environment, settings.START_TIMEOUT)

    def on_rank_stopped(self) -> None:
        self.end()

    def first_end(self) -> tuple[int | None, int | None]:
        if self._first is None:
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(PATIENCE)
            text, self._first = self.words(), (None, None)
            for pattern, sign in ((_LEFT, 0), (_CODE, 1), (_SIGNAL, -1)):
                if found := pattern.search(text):
                    self._first = int(found[1]), sign * int(found[found.lastindex or 1])
        return self._first
