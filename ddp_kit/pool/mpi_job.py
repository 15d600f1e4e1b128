"""Ranks that mpiexec starts: the processes of one MPI job.

They live and die together. mpiexec ends all of them when one has ended, and none can be added.
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
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection

from ddp_kit import mpi
from ddp_kit.errors import BackendError, PoolError
from ddp_kit.pool import mpi_member
from ddp_kit.pool.process import Ends, RankProcess

START_TIMEOUT = 60.0  # seconds until all processes must have called
PATIENCE = 2.0  # seconds for mpiexec to end, and to take its files along
LONGEST_PATH = 100  # bytes that a socket's path may have; some systems take a few more

# How Open MPI names the process that ended first: after a signal, with an exit code, with 0.
_SIGNAL = re.compile(r"process rank (\d+) with PID .* on signal (\d+)")
_CODE = re.compile(r"Process name: \[\S*,(\d+)\] Exit code: +(\d+)")
_LEFT = re.compile(r"process rank (\d+) with PID .* exiting improperly")

# mpiexec must end with this process, also if that is killed; the ranks see it themselves, too.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""


class MPIJob:
    """What mpiexec starts: one process for each rank. They take seconds to come.

    path: where its socket may stand; nobody else may open it. To be made while interrupts are held:
    mpiexec inherits SIGINT blocked.

    Raises PoolError if that cannot be.
    """

    def __init__(self, world_size: int, path: str) -> None:
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise PoolError(
                f"the name of the temporary folder is too long for MPI's ranks ({path!r}); "
                "set TMPDIR to a folder with a shorter name"
            )
        self.world_size = world_size
        self._path = path
        self._lines: list[socket.socket] = []
        self._calls: list[tuple[int, int, socket.socket]] = []  # rank, process id, connection
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self._first: tuple[int | None, int | None] | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        program = [sys.executable, mpi_member.__file__, path, json.dumps(sys.path)]
        command = [sys.executable, "-c", _END_WITH_PARENT, *mpi.mpiexec(world_size), *program]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": self._said, "stderr": self._said}
        around = os.environ | mpi.environment()
        try:
            self._listener.bind(path)
            self._listener.listen(world_size)
            self._mpiexec = subprocess.Popen(command, env=around, **pipes)
        except OSError as error:
            self._close_listener()
            self._said.close()
            raise PoolError(f"mpiexec cannot be started here ({error.strerror})") from error

    @property
    def all_called(self) -> bool:
        """Every process has called, and waits to become a rank."""
        return len(self._calls) == self.world_size

    def wait(self) -> None:
        """Wait until all processes have called; whatever comes between ends them.

        Raises BackendError if mpiexec does not start them, in its own words.
        """
        deadline = time.monotonic() + START_TIMEOUT
        try:
            while not self.all_called:
                if self.ended or time.monotonic() > deadline:
                    said = f"mpiexec did not start {self.world_size} ranks: {self._words()}"
                    raise BackendError(said)
                if connection.wait([self._listener], 0.05):
                    self._take_call()
        except BaseException:
            self.end()
            raise
        self._close_listener()

    def _take_call(self) -> None:
        line, _ = self._listener.accept()
        self._lines.append(line)
        line.settimeout(START_TIMEOUT)
        call = line.recv(mpi_member.CALL.size, socket.MSG_WAITALL)
        if len(call) == mpi_member.CALL.size:  # else it ended, and mpiexec will tell
            self._calls.append((*mpi_member.CALL.unpack(call), line))

    def admit(self) -> list[RankProcess]:
        """Make ranks of the processes that have called."""
        return [self._admit(*call) for call in sorted(self._calls)]

    def _admit(self, rank: int, pid: int, line: socket.socket) -> RankProcess:
        """Send a process what it needs to be a rank."""

        def start(ends: Ends) -> tuple[_Member, Callable[[], None]]:
            given = [ends.control.fileno(), ends.printed.fileno(), ends.board.fileno()]
            with suppress(BrokenPipeError, ConnectionResetError):  # its exit code tells
                socket.send_fds(line, [ends.mark.encode()], given)
            return _Member(self, rank, pid, line), self.end

        return RankProcess(start)

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def _words(self) -> str:
        """Return what mpiexec has said, in one line."""
        if self._said.closed:
            return "it was ended"
        self._said.seek(0)
        lines = self._said.read(4000).decode(errors="replace").splitlines()
        return " ".join(line.strip(" -") for line in lines if line.strip(" -")) or "it said nothing"

    @property
    def pid(self) -> int:
        """The process id of mpiexec."""
        return self._mpiexec.pid

    @property
    def ended(self) -> bool:
        """It was ended from here, or mpiexec has ended by itself."""
        return self._said.closed or self._mpiexec.poll() is not None

    def first_end(self) -> tuple[int | None, int | None]:
        """Return which rank was the first to end, and its exit code or minus its signal.

        None: mpiexec does not tell.
        """
        if self._first is None:
            with suppress(subprocess.TimeoutExpired):
                self._mpiexec.wait(PATIENCE)
            self._first = self._read_first()
        return self._first

    def _read_first(self) -> tuple[int | None, int | None]:
        words = self._words()
        for pattern, sign in ((_SIGNAL, -1), (_CODE, 1)):
            if found := pattern.search(words):
                return int(found[1]), sign * int(found[2])
        found = _LEFT.search(words)
        return (int(found[1]), 0) if found else (None, None)

    def end(self) -> None:
        """End all processes of the job, which see that their connection ends; then mpiexec.

        It is asked first: it has files to take along.
        """
        self._close_listener()
        if self._said.closed:
            return
        for line in self._lines:
            line.close()
        self._mpiexec.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._mpiexec.wait(PATIENCE)
        self._mpiexec.kill()
        self._mpiexec.wait()
        self._said.close()


class _Member:
    """One process of the job. Nobody here may wait for it: it is mpiexec's child."""

    def __init__(self, job: MPIJob, rank: int, pid: int, line: socket.socket) -> None:
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

    @property
    def followed(self) -> bool:
        """It was ended because another rank of the job had ended."""
        return self._job.first_end()[0] not in (None, self._rank)
