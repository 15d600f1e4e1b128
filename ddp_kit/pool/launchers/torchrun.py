"""Ranks that torchrun starts: the processes of its agent on this host."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

from ddp_kit.errors import PoolError
from ddp_kit.pool.launchers.base import Launcher, Program
from ddp_kit.pool.rank_handle import RankHandle
from ddp_kit.pool.wire.private_folder import PrivateFolder

SOCKET = "DDP_KIT_SOCKET"  # the environment variable that names the notebook's socket
REPORT_TIMEOUT = 10.0  # seconds for the agent to report which process failed first

# How the agent names the process that failed first: exit code or minus the signal, process id.
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")


class Torchrun(Launcher):
    """Starts ranks by torchrun's agent, for one run, and again for each restart of that run.

    program: the agent. hosts: how many hosts start ranks. timeout: seconds for them to come.
    """

    reusable = False

    def __init__(self, program: TorchrunProgram, hosts: int, timeout: float) -> None:
        self.hosts = hosts
        self._program, self._timeout = program, timeout

    def provide(self, ranks: list[RankHandle], world_size: int, broken: bool) -> bool:
        """Return the processes of the next start, after `wait`."""
        if ranks or not self._program.all_connected:
            return False
        ranks += self._program.admit()
        return True

    def wait(self) -> None:
        """Wait for the processes of all hosts. Raise PoolError if they do not come."""
        self._program.wait(self._timeout)

    def expect_restart(self) -> None:
        """Forget the processes of this start: torchrun starts all of them again."""
        self._program.expect_restart()

    def leave(self, seconds: float) -> None:
        """Give the agent `seconds` to end by itself."""
        self._program.leave(seconds)

    def end(self) -> None:
        """End the agent."""
        self._program.end()


class TorchrunProgram(Program):
    """The agent. When one of its processes fails, it ends all, and may start them again.

    options: torchrun's own. script: the file that each process runs. variables: what is added to
    its environment. hint: what to do if ranks of other hosts do not come.
    """

    name = "torchrun"
    start_error = PoolError

    def __init__(
        self,
        count: int,
        folder: PrivateFolder,
        options: Sequence[str],
        script: str,
        variables: Mapping[str, str],
        hint: str = "",
    ) -> None:
        self._hint = hint
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        command += [*options, "--log-dir", folder.logs, script]
        path = os.pathsep.join(filter(None, sys.path))
        # torchrun also takes options from these variables, which some clusters set.
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_"))}
        environment = own | variables | {SOCKET: folder.socket, "PYTHONPATH": path}
        super().__init__(count, folder.socket, command, environment)

    def explain_start(self, seconds: float) -> str:
        """Return a sentence on why the ranks did not come within `seconds`."""
        reason = self.reason()
        printed = f"; torchrun's last error: {reason}" if reason else ""
        if self.ended:
            return f"torchrun ended before its ranks had started{printed}"
        if self._hint:
            return f"not all ranks connected within {seconds:g} s: {self._hint}{printed}"
        return f"torchrun did not start {self.count} ranks within {seconds:g} s{printed}"

    def expect_restart(self) -> None:
        """Forget the processes of this start."""
        self._calls, self._first = [], None

    def first_end(self) -> tuple[int | None, int | None]:
        """Return which rank failed first, and its exit code or minus its signal."""
        pids = {pid: rank for rank, pid, _ in self._calls}
        deadline = time.monotonic() + REPORT_TIMEOUT
        while self._first is None:
            over = self.ended or time.monotonic() > deadline
            for code, pid in _FAILED.findall(self.printed()):
                if int(pid) in pids:
                    self._first = pids[int(pid)], int(code)
            if self._first is None and over:
                self._first = None, 0  # it reports every other exit code
            elif self._first is None:
                time.sleep(0.02)
        return self._first
