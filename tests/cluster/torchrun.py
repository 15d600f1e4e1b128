"""torchrun across two hosts: an agent on each, and what the agents and their ranks print."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from hosts import Host

PORT = "29400"  # where host 0 keeps the store
RENDEZVOUS = ("c10d", "static")  # how agents find each other


class Torchrun:
    """One program on `per_host` ranks of each host.

    folder: a new folder for what the agents and ranks print.
    program: a file, or -m and a module, with its arguments; "{host}" in one is the host's number.
    rendezvous: one of RENDEZVOUS.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        *program: str,
        rendezvous: str = "c10d",
        per_host: int = 2,
    ) -> None:
        self.hosts, self.folder, self.agents = hosts, folder, []
        folder.mkdir()
        first = hosts[0].address
        for number, host in enumerate(hosts):
            meeting = ["--master-addr", first, "--master-port", PORT, "--node-rank", str(number)]
            if rendezvous == "c10d":
                meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}"]
                meeting += ["--rdzv-id", "test", "--rdzv-conf", f"is_host={number == 0}".lower()]
                # Otherwise the ranks get the machine's name, which resolves to each host itself.
                meeting += ["--local-addr", host.address]
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *meeting]
            command += ["--nproc-per-node", str(per_host)]
            command += [part.replace("{host}", str(number)) for part in program]
            streams = (folder / f"{stream}-{number}" for stream in ("out", "err"))
            self.agents.append(host.start(command, *streams))

    def ranks(self) -> list[psutil.Process]:
        """List the running ranks and the processes that they have started."""
        agents = {agent.pid for agent in self.agents}
        return [p for host in self.hosts for p in host.processes() if p.pid not in agents]

    def wait(self, seconds: float) -> list[int]:
        """Wait until both agents have ended; return their exit codes."""
        deadline = time.monotonic() + seconds
        return [agent.wait(max(0, deadline - time.monotonic())) for agent in self.agents]

    def printed(self, stream: str) -> list[str]:
        """Return what was printed on "out" or "err", by host."""
        return [(self.folder / f"{stream}-{number}").read_text() for number in (0, 1)]
