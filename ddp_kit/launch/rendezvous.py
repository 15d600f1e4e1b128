"""The rendezvous of several hosts, and the commands to run on the other hosts."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import NamedTuple

from ddp_kit.errors import PoolError


class Rendezvous(NamedTuple):
    """Where ranks meet.

    hosts: how many. options: torchrun's, on each of them. port: None if torchrun chooses one.
    hint: what to do if ranks do not come.
    """

    hosts: int
    options: tuple[str, ...]
    port: int | None = None
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
    return Rendezvous(hosts, options, port, hint)


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
    try:
        with socket.create_server(("", port or 0)) as listener:
            return address, listener.getsockname()[1], doubt
    except OSError as error:
        raise PoolError(
            f"port {port} of this host is unavailable ({error.strerror}); leave out master_port= "
            "to use a free one"
        ) from None
