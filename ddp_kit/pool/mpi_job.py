"""Ranks that mpiexec starts: the processes of one MPI job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress

from ddp_kit import mpi
from ddp_kit.errors import BackendError
from ddp_kit.pool import mpi_member
from ddp_kit.pool.job import PATIENCE, Job

START_TIMEOUT = 60.0  # seconds until all processes must have called

# How Open MPI names the process that ended first: after a signal, with an exit code, with 0.
_SIGNAL = re.compile(r"process rank (\d+) with PID .* on signal (\d+)")
_CODE = re.compile(r"Process name: \[\S*,(\d+)\] Exit code: +(\d+)")
_LEFT = re.compile(r"process rank (\d+) with PID .* exiting improperly")


class MPIJob(Job):
    """What mpiexec starts. It ends all of them when one has ended."""

    name = "mpiexec"
    cannot_start = BackendError

    def __init__(self, world_size: int, path: str) -> None:
        program = [sys.executable, mpi_member.__file__, path, json.dumps([sys.path, sys.argv])]
        command = [*mpi.mpiexec(world_size), *program]
        super().__init__(world_size, path, command, os.environ | mpi.environment())

    def let_go(self) -> None:
        """End the job with the first rank that is stopped."""
        self.end()

    def first_end(self) -> tuple[int | None, int | None]:
        """Return which rank was the first to end, and how, as Open MPI tells it at its end."""
        if self._first is None:
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(PATIENCE)
            self._first = self._read_first()
        return self._first

    def _read_first(self) -> tuple[int | None, int | None]:
        words = self.words()
        for pattern, sign in ((_SIGNAL, -1), (_CODE, 1)):
            if found := pattern.search(words):
                return int(found[1]), sign * int(found[2])
        found = _LEFT.search(words)
        return (int(found[1]), 0) if found else (None, None)
