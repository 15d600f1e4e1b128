"""Ranks that torchrun starts: the processes of its agent on this host.

This module builds the agent's command line, and the one to run on each of the other hosts.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_kit.errors import PoolError
from ddp_kit.pool.launchers.base import Launcher, Program, Show
from ddp_kit.pool.rank_handle import RankHandle
from ddp_kit.pool.wire.messages import SOCKET
from ddp_kit.pool.wire.private_folder import PrivateFolder

REPORT_TIMEOUT = 10.0  # seconds for the agent to report which process failed first

# How the agent names the process that failed first: exit code or minus the signal, process id.
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")


class Torchrun(Launcher):
    """Starts ranks by torchrun's agent, for one run, and again for each restart of that run.

    program: the agent. rendezvous: where it meets those of other hosts. timeout: seconds for the
    ranks of all hosts to come.
    """

    reusable = False

    def __init__(self, program: TorchrunProgram, rendezvous: Rendezvous, timeout: float) -> None:
        self.hosts, self.store = rendezvous.hosts, rendezvous.store
        self._program, self._timeout = program, timeout

    def provide(self, ranks: list[RankHandle], world_size: int, broken: bool) -> bool:
        """Return the processes of the next start, after `wait`."""
        if ranks or not self._program.all_connected:
            return False
        ranks += self._program.admit()
        return True

    def wait(self, show: Show) -> None:
        """Wait for the processes of all hosts. Raise PoolError if they do not come."""
        self._program.wait(self._timeout, show)

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

    count: its processes. options: torchrun's. script: the file that each process runs. variables:
    what is added to its environment. hint: what to do if ranks of other hosts do not come.
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
        hint: str,
    ) -> None:
        self._hint = hint
        command = [sys.executable, "-m", "torch.distributed.run", *options, script]
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


class Rendezvous(NamedTuple):
    """Where ranks meet.

    hosts: how many. options: torchrun's, on each of them. store: the address and port of the store
    that they share; None if torchrun chooses them. hint: what to do if ranks do not come.
    """

    hosts: int
    options: tuple[str, ...]
    store: tuple[str, int] | None = None
    hint: str = ""

    def print_commands(self, nproc_per_node: int, file: Path, seconds: float) -> None:
        """Print the command that starts the ranks of each other host, within `seconds`."""
        for host in range(1, self.hosts):
            own = ["--node-rank", str(host), "--nproc-per-node", str(nproc_per_node)]
            print(f"On host {host}, within {seconds:g} s; copy the file there if it is missing:")
            print(f"  {shlex.join(['torchrun', *self.options, *own, str(file)])}", flush=True)


def choose_rendezvous(hosts: int, address: str | None, port: int | None) -> Rendezvous:
    """Return where the ranks of so many hosts meet. Raise PoolError if they cannot."""
    if hosts == 1:
        return Rendezvous(1, ("--standalone", "--local-addr", "127.0.0.1"))
    address, port, doubt = _choose_address(address, port)
    others = "host 1" if hosts == 2 else f"hosts 1 to {hosts - 1}"
    hint = (
        f"start those of {others} with the command above, each host with its own --node-rank, "
        f"and check that they can reach the address in it{doubt}"
    )
    options = ("--nnodes", str(hosts), "--master-addr", address, "--master-port", str(port))
    return Rendezvous(hosts, options, (address, port), hint)


def _choose_address(address: str | None, port: int | None) -> tuple[str, int, str]:
    """Return address, port, and what may be wrong with the address. Raise PoolError.

    The port is free now, and is taken only when torchrun listens.
    """
    address = address or socket.gethostname()
    doubt = ""
    try:
        family, *_ = socket.getaddrinfo(address, None)[0]
        socket.create_server((address, 0), family=family).close()
    except socket.gaierror:
        raise PoolError(
            f"this host cannot resolve the name {address!r}; set master_addr= to a name or an "
            "address of this host that the other hosts can reach"
        ) from None
    except OSError:  # a router may still map it to this host
        doubt = f"; {address!r} is not an address of this host's own interfaces"
    # On Linux, outgoing connections take ports from 32768 on by default. SystemRandom leaves the
    # learner's seed alone.
    for chosen in [port] if port else random.SystemRandom().sample(range(20000, 30000), 20):
        try:
            socket.create_server(("", chosen)).close()
        except OSError as error:
            reason = error.strerror
        else:
            return address, chosen, doubt
    if port:
        raise PoolError(
            f"port {port} of this host is unavailable ({reason}); leave out master_port= to use a "
            "free one"
        )
    raise PoolError(
        f"20 ports of this host between 20000 and 29999 are unavailable ({reason}); set "
        "master_port= to a free one"
    )
