"""Ranks that mpiexec starts: the processes of one MPI job.

They live and die together. mpiexec ends all of them when one has ended, and none can be added.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cached_property

from ddp_kit import mpi
from ddp_kit.errors import BackendError
from ddp_kit.pool import mpi_member
from ddp_kit.pool.interrupts import holding_interrupt
from ddp_kit.pool.process import Ends, RankProcess

START_TIMEOUT = 60.0  # seconds until all processes must have called
# How Open MPI names the process that ended first, after a signal or with an exit code.
_FIRST = re.compile(r"process rank (\d+) with PID|Process name: \[.*,(\d+)\]")

# mpiexec must end with this process, also if that is killed; the ranks see it themselves, too.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class MPIJob:
    """What mpiexec starts: one process for each rank. They take seconds to come.

    path: where its socket may stand; nobody else may open it.
    """

    def __init__(self, world_size: int, path: str) -> None:
        self.world_size = world_size
        self._path = path
        self._lines: list[socket.socket] = []
        self._calls: list[tuple[int, int, socket.socket]] = []  # rank, process id, connection
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        self._listener = socket.socket(socket.AF_UNIX)
        program = [sys.executable, mpi_member.__file__, path]
        command = [sys.executable, "-c", _DIE_WITH_PARENT, *mpi.mpiexec(world_size), *program]
        with holding_interrupt():
            self._listener.bind(path)
            self._listener.listen(world_size)
            self._mpiexec = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=os.environ | mpi.environment(),
            )

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
                if self._mpiexec.poll() is not None or time.monotonic() > deadline:
                    said = f"mpiexec did not start {self.world_size} ranks: {self._words()}"
                    raise BackendError(said)
                if select.select([self._listener], [], [], 0.05)[0]:
                    line, _ = self._listener.accept()
                    self._lines.append(line)
                    line.settimeout(START_TIMEOUT)
                    call = line.recv(mpi_member.CALL.size, socket.MSG_WAITALL)
                    self._calls.append((*mpi_member.CALL.unpack(call), line))
        except BaseException:
            self.end()
            raise
        self._close_listener()

    def admit(self) -> list[RankProcess]:
        """Make ranks of the processes that have called."""
        return [self._admit(*call) for call in sorted(self._calls)]

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.close()
            os.unlink(self._path)

    def _admit(self, rank: int, pid: int, line: socket.socket) -> RankProcess:
        """Send a process what it needs to be a rank."""

        def start(ends: Ends) -> tuple[_Member, Callable[[], None]]:
            answer = pickle.dumps((sys.path, ends.mark))
            given = [ends.control.fileno(), ends.printed.fileno(), ends.board.fileno()]
            socket.send_fds(line, [mpi_member.SIZE.pack(len(answer))], given)
            line.sendall(answer)
            return _Member(self, rank, pid, line), self.end

        return RankProcess(start)

    def _words(self) -> str:
        """Return what mpiexec has said, in one line."""
        self._said.seek(0)
        lines = self._said.read(4000).decode(errors="replace").splitlines()
        return " ".join(line.strip(" -") for line in lines if line.strip(" -")) or "it said nothing"

    @property
    def pid(self) -> int:
        """The process id of mpiexec."""
        return self._mpiexec.pid

    @cached_property
    def first_end(self) -> tuple[int | None, int | None]:
        """Which rank was the first to end, and how; None: mpiexec does not tell."""
        try:
            code = self._mpiexec.wait(2)
        except subprocess.TimeoutExpired:
            return None, None
        first = _FIRST.search(self._words())
        rank = int(first[1] or first[2]) if first else None
        return rank, 128 - code if code > 128 else code

    @property
    def ended(self) -> bool:
        """It was ended from here, or mpiexec has ended by itself."""
        return self._said.closed or self._mpiexec.poll() is not None

    def end(self) -> None:
        """End all processes of the job; mpiexec takes those along that have not seen it yet."""
        self._close_listener()
        if self._said.closed:
            return
        for line in self._lines:
            line.close()
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
        if self._code is None:
            if self._line.fileno() < 0:
                self._code = -signal.SIGKILL  # the job was ended from here
            elif select.select([self._line], [], [], 0)[0]:
                _, code = self._job.first_end
                self._code = 1 if code is None else code
        return self._code

    @property
    def followed(self) -> bool:
        """It was ended because another rank of the job had ended."""
        return self._job.first_end[0] not in (None, self._rank)
