"""Init methods: how ranks find each other before the first message.

`env://`, `file://`, `tcp://` and a `Store` made by hand, what the ranks write into it, and what
PyTorch's words mean when they do not find each other. Source: "Writing Distributed Applications
with PyTorch", section Initialization Methods.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._explain import MEANINGS, explain  # noqa: F401 - the notebook uses them
from ddp_kit.lessons._noted_store import NotedStore, ranks_in

LOOPBACK = "127.0.0.1"
HERE = os.environ.get("MASTER_ADDR", LOOPBACK)  # torchrun names rank 0's host to all the others
PATIENCE = timedelta(seconds=30)  # for a meeting that should succeed


def sum_of_ranks() -> int:
    """Talk once in the group that was formed, and leave it; return the sum of all ranks."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def by_environment(rank: int, world_size: int, port: int) -> int:
    """Meet at the address that the environment names. RANK and WORLD_SIZE are there already."""
    os.environ.setdefault("MASTER_ADDR", HERE)
    os.environ.setdefault("MASTER_PORT", str(port))
    dist.init_process_group("gloo", init_method="env://", timeout=PATIENCE)
    return sum_of_ranks()


def by_file(rank: int, world_size: int, path: str) -> int:
    """Meet in a file that every rank can write to."""
    place = {"rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", init_method=f"file://{path}", timeout=PATIENCE, **place)
    return sum_of_ranks()


def by_tcp(rank: int, world_size: int, port: int) -> int:
    """Meet at an address that every rank knows; rank 0 listens there."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # under torchrun no rank would listen
    place = {"rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", init_method=f"tcp://{HERE}:{port}", timeout=PATIENCE, **place)
    return sum_of_ranks()


def by_store(rank: int, world_size: int, port: int) -> int:
    """Meet in a store made by hand."""
    place = {"rank": rank, "world_size": world_size}
    store = dist.TCPStore(HERE, port, world_size, is_master=rank == 0, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, timeout=PATIENCE, **place)
    return sum_of_ranks()


def meeting_places(rank: int, world_size: int) -> dict[str, str | int]:
    """Propose where to meet: a new folder, and ports that nobody uses at this moment."""
    folder, (first, second, third) = tempfile.mkdtemp(), free_ports(3)
    return {"folder": folder, "env": first, "tcp": second, "store": third}


def free_ports(count: int) -> list[int]:
    """Ask the system for ports that are free now; they are taken only when somebody listens."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def noted(rank: int, world_size: int, path: str) -> dict:
    """Form a group through a store that takes notes, and talk once.

    Returns "notes" (as NotedStore has them), "later" (how many of them came after the group was
    formed), and "listens" (whether what this rank wrote holds an address at which it listens; None
    where the system does not tell).
    """
    store = NotedStore(dist.FileStore(path, world_size))
    place = {"rank": rank, "world_size": world_size, "timeout": PATIENCE}
    dist.init_process_group("gloo", store=store, **place)
    formed = len(store.notes)
    own = [(ip, port) for ip, port, pid in listeners() if pid == os.getpid()]
    written = b"".join(store.values.values())
    found = any(packed(ip) in written and port.to_bytes(2, "big") in written for ip, port in own)
    sum_of_ranks()
    later = len(store.notes) - formed
    return {"notes": store.notes, "later": later, "listens": found if own else None}


def packed(ip: str) -> bytes:
    """Return an address as the bytes that the system uses."""
    return socket.inet_pton(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip)


def listeners() -> list[tuple[str, int, int | None]]:
    """List who listens on this machine: address, port, and process id where the system tells it.

    Where the system tells it to an administrator only, it lists what this process listens at.
    """
    try:
        found = [(c, c.pid) for c in psutil.net_connections("tcp")]
    except psutil.AccessDenied:
        found = [(c, os.getpid()) for c in psutil.Process().net_connections("tcp")]
    return [(c.laddr.ip, c.laddr.port, pid) for c, pid in found if c.status == psutil.CONN_LISTEN]


def owner(port: int) -> str:
    """Say who listens on a port of this machine, as far as the system tells."""
    try:
        pids = {pid for _, other, pid in listeners() if other == port}
        names = {
            "this process" if pid == os.getpid() else psutil.Process(pid).name()
            for pid in pids - {None}
        }
    except psutil.Error:  # it ended meanwhile, or belongs to somebody else
        names = set()
    return " and ".join(sorted(names)) or "nobody, or a process that the system does not name"


def attempt(
    rank: int,
    world_size: int,
    url: str,
    claims: Sequence[tuple[int, int, float] | None],
    late: float = 0,
) -> int | None:
    """Try to form a group. What a rank says about itself may be wrong.

    claims: for each rank, the rank, the world size and the time limit in seconds that it gives to
    PyTorch; None keeps it away. late: seconds by which all ranks but rank 0 come later.
    """
    if claims[rank] is None:
        return None
    time.sleep(late if rank else 0)
    rank, world_size, seconds = claims[rank]
    place = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=seconds)}
    with quiet():
        dist.init_process_group("gloo", init_method=url, **place)
    return sum_of_ranks()


@contextmanager
def quiet() -> Iterator[None]:
    """Send what this process writes to file descriptor 2 nowhere.

    When a meeting fails, PyTorch's C++ prints a page of addresses there, besides what it raises.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def killed(rank: int, world_size: int, path: str) -> None:
    """Form a group through a file; then rank 1's process is killed, and cleans up nothing."""
    place = {"rank": rank, "world_size": world_size, "timeout": PATIENCE}
    dist.init_process_group("gloo", init_method=f"file://{path}", **place)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def main(argv: list[str] | None = None) -> None:
    """Meet in four ways, and look into the store; print one line."""
    options = lesson_parser("init_methods", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace, init=False) as ranks:
        n = ranks.world_size
        proposed = list(ranks(meeting_places))
        places = proposed[0]  # rank 0 decides
        try:
            path = f"{places['folder']}/noted"
            for rank, seen in enumerate(ranks(noted, path)):
                _prove_all_gather(seen, rank, n)
            for worker, place in (
                (by_environment, places["env"]),
                (by_file, f"{places['folder']}/met"),
                (by_tcp, places["tcp"]),
                (by_store, places["store"]),
            ):
                with patch.dict(os.environ):  # under torchrun a worker changes this process's own
                    sums = list(ranks(worker, place))
                prove(f"all ranks met {worker.__name__}", sums == [n * (n - 1) // 2] * n)
        finally:
            for place in proposed:
                shutil.rmtree(place["folder"], ignore_errors=True)
        ranks.say(f"init_methods: {ranks}, met in 4 ways, one address from each in the store")


def _prove_all_gather(seen: dict, rank: int, world_size: int) -> None:
    wrote = [key for call, key, _ in seen["notes"] if call == "set"]
    read = [key for call, key, _ in seen["notes"] if call == "get"]
    prove("a rank writes one key, which ends in its number", ranks_in(wrote) == [rank])
    prove("it reads the key of every rank", sorted(ranks_in(read)) == list(range(world_size)))
    prove("what it wrote is an address at which it listens", seen["listens"] is not False)
    prove("messages do not go through the store", seen["later"] == 0)


if __name__ == "__main__":
    run_as_script(main)
