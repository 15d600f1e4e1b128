"""Processes that a program starts for the pool: they call at a socket, and become ranks.

The program is mpiexec, or torchrun's agent. It hands no pipes down, so the pool sends them in
answer to the call. Its processes live and die together; none can be added.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection

from ddp_kit.errors import KitError, PoolError
from ddp_kit.pool.mpi_member import CALL
from ddp_kit.pool.process import Ends, RankProcess

KEPT = 8000  # bytes of what the program prints that are read at its beginning and at its end
PATIENCE = 2.0  # seconds for the program to end, and to take its files along
LONGEST_PATH = 100  # bytes that a socket's path may have; some systems take a few more

_PREFIX = re.compile(r"^\[[WE][^\]]*\] (\[c10d\] )?")  # of a line that C++ logs
_RAISED = re.compile(r"([\w.]*\.)?(?=\w*(Error|Exception): )")

# The program must end with this process, also if that is killed; the ranks see it themselves, too.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Job:
    """What one program has started: one process for each rank. They take seconds to come.

    count: how many processes call. path: where the socket may stand; nobody else may open it.
    command: starts the program, in the environment `around`. To be made while interrupts are held:
    the program inherits SIGINT blocked.

    Raises PoolError if that cannot be.
    """

    name: str  # of the program
    cannot_start: type[KitError]

    def __init__(
        self, count: int, path: str, command: Sequence[str], around: Mapping[str, str]
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
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self._last = ""  # what the program had printed when it was ended
        self._first: tuple[int | None, int | None] | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": self._said, "stderr": self._said}
        watched = [sys.executable, "-c", _END_WITH_PARENT, *command]
        try:
            self._listener.bind(path)
            self._listener.listen(count)
            self._program = subprocess.Popen(watched, env=dict(around), **pipes)
        except OSError as error:
            self.close_listener()
            self._said.close()
            raise PoolError(f"{self.name} cannot be started here ({error.strerror})") from error

    @property
    def all_called(self) -> bool:
        """Every process has called, and waits to become a rank."""
        return len(self._calls) == self.count

    def wait(self, seconds: float) -> None:
        """Wait until all processes have called; whatever comes between ends them.

        Raises `cannot_start` if they do not come within `seconds`, in the program's own words.
        """
        deadline = time.monotonic() + seconds
        try:
            while not self.all_called:
                if self.ended or time.monotonic() > deadline:
                    raise self.cannot_start(self.why_not(seconds))
                if connection.wait([self._listener], 0.05):
                    self._take_call()
        except BaseException:
            self.end()
            raise

    def why_not(self, seconds: float) -> str:
        """Say in one sentence that the ranks did not come within that time, and why."""
        return f"{self.name} did not start {self.count} ranks: {self.words()}"

    def _take_call(self) -> None:
        line, _ = self._listener.accept()
        self._lines.append(line)
        line.settimeout(PATIENCE)  # its words are on their way already
        with suppress(TimeoutError):
            call = line.recv(CALL.size, socket.MSG_WAITALL)
            if len(call) == CALL.size:  # else it ended, and the program will tell
                attempt, rank, pid = CALL.unpack(call)
                if attempt != self._attempt:  # it was started again, with all others
                    self._attempt, self._calls = attempt, []
                self._calls.append((rank, pid, line))

    def admit(self) -> list[RankProcess]:
        """Make ranks of the processes that have called."""
        return [self._admit(*call) for call in sorted(self._calls)]

    def _admit(self, rank: int, pid: int, line: socket.socket) -> RankProcess:
        """Send a process what it needs to be a rank."""

        def start(ends: Ends) -> tuple[_Member, Callable[[], None]]:
            given = [ends.control.fileno(), ends.printed.fileno(), ends.board.fileno()]
            with suppress(BrokenPipeError, ConnectionResetError):  # its exit code tells
                socket.send_fds(line, [ends.mark.encode()], given)
            return _Member(self, rank, pid, line), self.let_go

        return RankProcess(start)

    def let_go(self) -> None:
        """Note that a rank was stopped; called once for each of them."""

    def close_listener(self) -> None:
        """Take no more calls."""
        if self._listener.fileno() >= 0:
            self._listener.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def said(self) -> str:
        """Return what the program has printed, its beginning and its end."""
        if self._said.closed:
            return self._last
        # Not by seek: the program writes where this file's position is.
        file = self._said.fileno()
        size = os.fstat(file).st_size
        if size <= 2 * KEPT:
            return os.pread(file, size, 0).decode(errors="replace")
        ends = os.pread(file, KEPT, 0), os.pread(file, KEPT, size - KEPT)
        return "\n".join(end.decode(errors="replace") for end in ends)

    def words(self) -> str:
        """Return what the program has said, in one line."""
        if self._said.closed:
            return "it was ended"
        lines = self.said()[:4000].splitlines()
        return " ".join(line.strip(" -") for line in lines if line.strip(" -")) or "it said nothing"

    def reason(self) -> str:
        """Return what was printed last of what is wrong, in one line; "" if nothing was."""
        lines = [_PREFIX.sub("", line) for line in self.said().splitlines()]
        raised = [_RAISED.sub("", line, count=1) for line in lines if _RAISED.match(line)]
        told = raised or [line for line in lines if line.startswith("The ")]
        return told[-1].partition(" - retrying")[0][:300].rstrip(".") if told else ""

    @property
    def pid(self) -> int:
        """The process id of the program."""
        return self._program.pid

    @property
    def ended(self) -> bool:
        """It was ended from here, or the program has ended by itself."""
        return self._said.closed or self._program.poll() is not None

    def first_end(self) -> tuple[int | None, int | None]:
        """Return which rank was the first to end, and its exit code or minus its signal.

        None: the program does not tell.
        """
        raise NotImplementedError

    def leave(self, seconds: float) -> None:
        """Let the program end by itself, if it does so within `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._program.wait(seconds)

    def end(self) -> None:
        """End all processes of the job, which see that their connection ends; then the program.

        It is asked first: it has files to take along.
        """
        self.close_listener()
        if self._said.closed:
            return
        for line in self._lines:
            line.close()
        self._program.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._program.wait(PATIENCE)
        self._program.kill()
        self._program.wait()
        self._last = self.said()
        self._said.close()


class _Member:
    """One process of the job. Nobody here may wait for it: it is the program's child."""

    def __init__(self, job: Job, rank: int, pid: int, line: socket.socket) -> None:
        self.pid, self.sentinel, self.launcher = pid, line.fileno(), job.pid
        self._job, self._rank, self._line = job, rank, line
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it runs."""
        if self._code is None and self._line.fileno() < 0:
            self._code = -signal.SIGKILL  # the job was ended from here
        elif self._code is None and (connection.wait([self._line], 0) or self._job.ended):
            _, code = self._job.first_end()
            self._code = 1 if code is None else code
        return self._code

    def why_not_ready(self) -> str:
        """Return what was printed last of why it did not become a rank; "" if nothing was."""
        return self._job.reason()

    @property
    def followed(self) -> bool:
        """It was ended because another rank of the job had ended."""
        return self._job.first_end()[0] not in (None, self._rank)
