"""What may be asked of `kit.torchrun`, and where the ranks of its hosts meet."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ddp_kit import pool
from ddp_kit.backends import choose_backend
from ddp_kit.errors import BackendError, PoolError
from ddp_kit.pool.request import check_signature
from ddp_kit.pool.request import pack as pack_worker


class Meeting(NamedTuple):
    """How torchrun is told where the ranks meet.

    hosts: how many. options: for torchrun on each of them. port: None where torchrun takes one.
    advice: what to do if ranks do not come.
    """

    hosts: int
    options: tuple[str, ...]
    port: int | None = None
    advice: str = ""

    def tell_hosts(self, nproc_per_node: int, file: Path, seconds: float) -> None:
        """Print the line that starts the ranks of each other host. seconds: how long they have."""
        for host in range(1, self.hosts):
            own = ["--node-rank", str(host), "--nproc-per-node", str(nproc_per_node)]
            print(f"On host {host}, within {seconds:g} s; the file must be there, too:")
            print(f"  {shlex.join(['torchrun', *self.options, *own, str(file)])}", flush=True)


def meet(hosts: int, address: str | None, port: int | None) -> Meeting:
    """Return where the ranks of so many hosts meet. Raises PoolError where they cannot."""
    if hosts == 1:
        return Meeting(1, ("--standalone", "--local-addr", "127.0.0.1"))
    address, port, doubt = _meeting_place(address, port)
    others = "host 1" if hosts == 2 else f"hosts 1 to {hosts - 1}"
    advice = (
        f"start those of {others} with the line above, each host with its own --node-rank, "
        f"and check that they reach the address in it{doubt}"
    )
    place = ("--master-addr", address, "--master-port", str(port))
    return Meeting(hosts, ("--nnodes", str(hosts), *place), port, advice)


def check(
    worker: Callable[..., Any] | str,
    args: tuple,
    nproc_per_node: int,
    nnodes: int,
    backend: str,
    max_restarts: int,
    master_addr: str | None,
    master_port: int | None,
) -> str:
    """Refuse what cannot be run, before anything starts; return the backend."""
    _check_number("nproc_per_node", nproc_per_node, 1)
    _check_number("nnodes", nnodes, 1)
    _check_number("max_restarts", max_restarts, 0)
    if nnodes > 1 and max_restarts > 0:
        raise PoolError(
            "max_restarts= is for one host here; for several, start torchrun on each of them with "
            "--rdzv-backend c10d, so that it starts all ranks again together"
        )
    if nnodes == 1 and (master_addr, master_port) != (None, None):
        raise PoolError("one host needs no master_addr= and master_port=; leave them out")
    if not isinstance(master_addr, str | None):
        raise PoolError(f'master_addr must be a name such as "host0", got {master_addr!r}')
    if master_port is not None:
        _check_number("master_port", master_port, 1)
        if master_port > 65535:
            raise PoolError(f"master_port must be at most 65535, got {master_port}")
    pool.check_world_size(nproc_per_node)
    chosen = choose_backend(backend, nproc_per_node)
    if chosen == "mpi":
        raise BackendError('torchrun starts no ranks of MPI; use kit.run(..., backend="mpi")')
    if isinstance(worker, str):
        for arg in args:
            if not isinstance(arg, str):
                raise PoolError(f"the options of a module or file are strings, got {arg!r}")
    else:
        check_signature(worker, args, set_by="nproc_per_node=")
        pack_worker(worker, args).close()  # to tell what cannot be sent
    return chosen


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PoolError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _meeting_place(address: str | None, port: int | None) -> tuple[str, int, str]:
    """Return where the ranks meet, and what may be wrong with it. Raises PoolError if it cannot be.

    The port is free now, and is taken only when torchrun listens.
    """
    address = address or socket.gethostname()
    doubt = ""
    try:
        family, *_ = socket.getaddrinfo(address, None)[0]
        socket.create_server((address, 0), family=family).close()
    except socket.gaierror:
        raise PoolError(
            f"this host does not know the name {address!r}; set master_addr= to a name or an "
            "address of this host that the other hosts can reach"
        ) from None
    except OSError:  # it may still be one that a router gives to this host
        doubt = f", and {address!r} is no address that this host knows as its own"
    try:
        with socket.create_server(("", port or 0)) as listener:
            return address, listener.getsockname()[1], doubt
    except OSError as error:
        raise PoolError(
            f"port {port} of this host cannot be had ({error.strerror}); leave master_port= out, "
            "and a free one is taken"
        ) from None
