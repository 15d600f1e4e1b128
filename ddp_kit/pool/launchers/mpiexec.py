"""Ranks that mpiexec starts: the processes of one MPI job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress

from ddp_kit.backends import mpi
from ddp_kit.errors import BackendError
from ddp_kit.pool.launchers.base import PATIENCE, Launcher, Program, Show
from ddp_kit.pool.rank import mpiexec_main
from ddp_kit.pool.rank_handle import RankHandle, stop_ranks
from ddp_kit.pool.wire.messages import CALL
from ddp_kit.pool.wire.private_folder import PrivateFolder

CONNECT_TIMEOUT = 60.0  # seconds until all processes must have connected

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
        """End mpiexec and everything it has started."""
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
        """End the whole job with the first rank that is stopped."""
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
