"""Two hosts on one machine: network namespaces, and one link between them.

    host 0, 10.199.0.1  cable ──────── cable  host 1, 10.199.0.2

Neither sees the machine's own network, nor the hosts of another test; all their ports are free.
What else hosts differ in they share: files, clock, process ids, the machine's name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

LINK = "cable"  # the interface, on either host
_NAME = re.compile(r"ddp_kit-(\d+)-\S+")  # a namespace of the process with this id
_numbers = count()


@dataclass(frozen=True)
class Host:
    """A network namespace, and its address on the link."""

    name: str
    address: str = ""

    def link(self, state: str) -> None:
        """Set this host's end of the link "down" or "up"."""
        _call("ip", "-n", self.name, "link", "set", LINK, state)

    def shape(self, rate: str) -> None:
        """Limit how many bits a second this host sends, such as "100mbit".

        The bucket holds few packets, so that almost nothing is faster; the queue holds all that a
        rank sends at once, so that no packet is lost.
        """
        shaping = ("tbf", "rate", rate, "burst", "4kb", "limit", "8mb")
        _call("tc", "-n", self.name, "qdisc", "replace", "dev", LINK, "root", *shaping)

    def set(self, name: str, value: str) -> None:
        """Change how TCP works on this host."""
        _call(*self.command("sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}"))

    def command(self, *program: str) -> list[str]:
        """Return the command that runs a program here; its process is the program's own."""
        return ["ip", "netns", "exec", self.name, *program]

    def start(self, command: Sequence[str], out: Path, err: Path) -> psutil.Popen:
        """Start a program here, in the folder of the files into which it prints."""
        around = os.environ | {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
        with out.open("w") as to_out, err.open("w") as to_err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": to_out, "stderr": to_err}
            return psutil.Popen(self.command(*command), env=around, cwd=out.parent, **streams)

    def processes(self) -> list[psutil.Process]:
        """List what runs here."""
        found = []
        with suppress(subprocess.CalledProcessError):  # the namespace no longer exists
            for pid in _call("ip", "netns", "pids", self.name).split():
                with suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(pid)))
        return found

    def remove(self) -> None:
        """End what runs here, then remove the namespace and, with it, the link."""
        deadline = time.monotonic() + 10
        while (running := self.processes()) and time.monotonic() < deadline:
            for process in running:  # one that is forked meanwhile is found the next time
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(running, timeout=1)
        with suppress(subprocess.CalledProcessError):
            _call("ip", "netns", "del", self.name)


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Make two hosts and their link; at the end, remove them and end all that runs there."""
    own = f"ddp_kit-{os.getpid()}-{next(_numbers)}"
    hosts = [Host(f"{own}-{number}", f"10.199.0.{number + 1}") for number in (0, 1)]
    try:
        for host in hosts:
            _call("ip", "netns", "add", host.name)
        ends = [("name", LINK, "netns", host.name) for host in hosts]
        _call("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            _call("ip", "-n", host.name, "addr", "add", f"{host.address}/30", "dev", LINK)
            _call("ip", "-n", host.name, "link", "set", "lo", "up")
            host.link("up")
            host.set("tcp_retries2", "4")  # give up after seconds, not a quarter of an hour
            host.set("tcp_congestion_control", "reno")  # the same on every machine
        yield hosts
    finally:
        for host in hosts:
            host.remove()


def missing() -> str | None:
    """Return why such hosts are impossible here, or None if they are possible."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        return f"there is no {' and no '.join(absent)}; both come with iproute2"
    host = Host(f"ddp_kit-{os.getpid()}-probe")
    try:
        _call("ip", "netns", "add", host.name)
        _call(*host.command("true"))
        _call("ip", "-n", host.name, "link", "add", LINK, "type", "veth")
        host.shape("100mbit")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    finally:
        host.remove()
    return None


def sweep() -> None:
    """Remove the hosts that a killed test run has left, and end all that runs there."""
    for line in _call("ip", "netns", "list").splitlines():
        match = _NAME.match(line)
        if match and not psutil.pid_exists(int(match[1])):
            Host(match[0]).remove()


def _call(*command: str) -> str:
    """Run a short command; return what it printed."""
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(command, check=True, timeout=600, **streams).stdout
