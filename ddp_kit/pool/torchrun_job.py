"""Ranks that torchrun starts: the processes of its agent on this host."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

from ddp_kit.errors import PoolError
from ddp_kit.pool.folder import PrivateFolder
from ddp_kit.pool.job import Job

SOCKET = "DDP_KIT_SOCKET"  # tells a process that torchrun has started where to call
TELLING = 10.0  # seconds for the agent to tell which process was the first to fail

# How the agent names the process that failed first: exit code or minus the signal, process id.
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")


class TorchrunJob(Job):
    """What torchrun's agent starts. When one process fails, it ends all, and may start them again.

    options: torchrun's own; program: the file that each process runs; environment: what else it
    finds in its environment; advice: what to do if ranks of other hosts do not come.
    """

    name = "torchrun"
    cannot_start = PoolError

    def __init__(
        self,
        count: int,
        folder: PrivateFolder,
        options: Sequence[str],
        program: str,
        environment: Mapping[str, str],
        advice: str = "",
    ) -> None:
        self._advice = advice
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        command += [*options, "--log-dir", folder.logs, program]
        path = os.pathsep.join(filter(None, sys.path))
        # torchrun would take its options from there, too, as some clusters set them.
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_"))}
        around = own | environment | {SOCKET: folder.socket, "PYTHONPATH": path}
        super().__init__(count, folder.socket, command, around)

    def why_not(self, seconds: float) -> str:
        """Say in one sentence that the ranks did not come within that time, and why."""
        reason = self.reason()
        told = f"; torchrun's last words: {reason}" if reason else ""
        if self.ended:
            return f"torchrun ended before its ranks had started{told}"
        if self._advice:
            return f"the ranks did not all come within {seconds:g} s: {self._advice}{told}"
        return f"torchrun did not start {self.count} ranks within {seconds:g} s{told}"

    def forget(self) -> None:
        """Make ready for the next start of all processes: these have had their run."""
        self._calls, self._first = [], None

    def first_end(self) -> tuple[int | None, int | None]:
        """Return which rank was the first to end, and its exit code or minus its signal."""
        pids = {pid: rank for rank, pid, _ in self._calls}
        deadline = time.monotonic() + TELLING
        while self._first is None:
            over = self.ended or time.monotonic() > deadline
            for code, pid in _FAILED.findall(self.said()):
                if int(pid) in pids:
                    self._first = pids[int(pid)], int(code)
            if self._first is None and over:
                self._first = None, 0  # it tells of every other exit code
            elif self._first is None:
                time.sleep(0.02)
        return self._first
