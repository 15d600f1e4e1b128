"""Init methods: how ranks find each other before the first message (the rendezvous).

`env://`, `file://`, `tcp://` and a `Store` made by hand, what the ranks write into it, and what
PyTorch's messages mean when a rendezvous fails. Source: "Writing Distributed Applications
with PyTorch", section Initialization Methods.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.error_text import name_ranks
from ddp_kit.errors import RankError
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._recording_store import (
    ForwardingStore,  # noqa: F401 - for the notebook
    RecordingStore,
    ranks_in,
)
from ddp_kit.renamed import renamed

LOOPBACK = "127.0.0.1"
HERE = os.environ.get("MASTER_ADDR", LOOPBACK)  # torchrun sets it to rank 0's host on all ranks
PATIENCE = timedelta(seconds=30)  # for a rendezvous that should succeed

__getattr__ = renamed(__name__, NotedStore="RecordingStore")


def sum_of_ranks() -> int:
    """Communicate once in the new group, destroy it, and return the sum of all ranks."""
    total = torch.tensor([dist.get_rank()], device=device())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def by_environment(rank: int, world_size: int, port: int) -> int:
    """Rendezvous at the address in the environment, where RANK and WORLD_SIZE are set already."""
    os.environ.setdefault("MASTER_ADDR", HERE)
    os.environ.setdefault("MASTER_PORT", str(port))
    dist.init_process_group("gloo", init_method="env://", timeout=PATIENCE)
    return sum_of_ranks()


def by_file(rank: int, world_size: int, path: str) -> int:
    """Rendezvous in a file that every rank can write to."""
    url = f"file://{path}"
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=world_size, timeout=PATIENCE
    )
    return sum_of_ranks()


def by_tcp(rank: int, world_size: int, port: int) -> int:
    """Rendezvous at an address that every rank knows; rank 0 listens there."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # under torchrun no rank would listen
    url = f"tcp://{HERE}:{port}"
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=world_size, timeout=PATIENCE
    )
    return sum_of_ranks()


def by_store(rank: int, world_size: int, port: int) -> int:
    """Rendezvous in a store made by hand."""
    store = dist.TCPStore(HERE, port, world_size, is_master=rank == 0, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    return sum_of_ranks()


def propose_rendezvous(rank: int, world_size: int) -> dict[str, str | int]:
    """Return a new folder, and ports that nobody uses at this moment."""
    folder, (first, second, third) = tempfile.mkdtemp(), free_ports(3)
    return {"folder": folder, "env": first, "tcp": second, "store": third}


def free_ports(count: int) -> list[int]:
    """Return ports that are free now; they stay so until somebody listens on them.

    They are below 30000, because outgoing connections get larger ones by themselves. SystemRandom
    leaves the seed of the learner's random numbers alone.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20000, 30000), k=10000):
        if len(found) == count:
            break
        with suppress(OSError), socket.create_server((LOOPBACK, port)):
            found.append(port)
    return found


def noted(rank: int, world_size: int, path: str) -> dict:
    """Form a group through a RecordingStore, and communicate once.

    Returns "notes" (the store's), "later" (how many of them were made after the group was
    formed), and "listens" (the address that this rank wrote and on which it listens, as
    `own_address` returns it).
    """
    store = RecordingStore(dist.FileStore(path, world_size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    formed = len(store.notes)
    listens = own_address(store.values)
    sum_of_ranks()
    later = len(store.notes) - formed
    return {"notes": store.notes, "later": later, "listens": listens}


def own_address(values: Mapping[str, bytes]) -> str | None:
    """Return the address in a store's values on which this process listens, as "127.0.0.1:PORT".

    Returns "nothing" if they contain no such address, and None if the system reports no listener
    of this process. The port differs from run to run, and so it is not shown.
    """
    own = [(ip, port) for ip, port, pid in listeners() if pid == os.getpid()]
    written = b"".join(values.values())
    for ip, port in own:
        if packed(ip) in written and port.to_bytes(2, "big") in written:
            return f"{ip}:PORT"
    return "nothing" if own else None


def packed(ip: str) -> bytes:
    """Return an IP address as bytes in network order."""
    return socket.inet_pton(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip)


def listeners() -> list[tuple[str, int, int | None]]:
    """Return all listeners of this machine: address, port, and process id where it is known.

    Where only an administrator may ask for all of them, return those of this process.
    """
    try:
        found = [(c, c.pid) for c in psutil.net_connections("tcp")]
    except psutil.AccessDenied:
        found = [(c, os.getpid()) for c in psutil.Process().net_connections("tcp")]
    return [(c.laddr.ip, c.laddr.port, pid) for c, pid in found if c.status == psutil.CONN_LISTEN]


def owner(port: int) -> str:
    """Return the names of the processes that listen on a port, as far as the system shows them."""
    try:
        pids = {pid for _, other, pid in listeners() if other == port}
        names = {
            "this process" if pid == os.getpid() else psutil.Process(pid).name()
            for pid in pids - {None}
        }
    except psutil.Error:  # it has ended meanwhile, or belongs to another user
        names = set()
    return " and ".join(sorted(names)) or "no process, or one that the system does not show"


def attempt(
    rank: int,
    world_size: int,
    url: str,
    claims: Sequence[tuple[int, int, float] | None],
    late: float = 0,
) -> int | None:
    """Try to form a group in which ranks may give PyTorch wrong numbers.

    claims: for each rank, the rank, world size and time limit in seconds that it gives to
    PyTorch; None keeps it away. late: seconds by which all ranks but rank 0 are delayed.
    """
    if claims[rank] is None:
        return None
    time.sleep(late if rank else 0)
    rank, world_size, seconds = claims[rank]
    limit = timedelta(seconds=seconds)
    with quiet():
        dist.init_process_group(
            "gloo", init_method=url, rank=rank, world_size=world_size, timeout=limit
        )
    return sum_of_ranks()


@contextmanager
def quiet() -> Iterator[None]:
    """Discard what this process writes to file descriptor 2 (stderr).

    When a rendezvous fails, PyTorch's C++ code not only raises, but also prints a page of
    addresses there.
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
    """Form a group through a file; then rank 1's process is killed and cleans up nothing."""
    url = f"file://{path}"
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=world_size, timeout=PATIENCE
    )
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


START_ALL = "Start every rank, each with its own rank number and all with the same world size."

# What PyTorch's message contains, what it means, and what to do.
MEANINGS = {
    "expected, but not set": (
        "env:// needs an environment variable that is not set.",
        "Start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank.",
    ),
    "clients joined": ("it hosts the store, and not all ranks connected in time.", START_ALL),
    "Wait timeout": ("it waited for another rank, which wrote nothing to the file.", START_ALL),
    "wait timeout": ("it waited for another rank, which wrote nothing to the store.", START_ALL),
    "EADDRINUSE": (
        "it must listen on a port that another process is using.",
        "Choose a free port. Only one rank may be rank 0.",
    ),
    "to connect to": (
        "nothing listens at the address it was given.",
        "Start rank 0. MASTER_ADDR and MASTER_PORT, or the URL, must name its machine and port.",
    ),
    "onnect": (  # "Connection refused" or "Connect timeout": it depends on which rank connects
        "it found another rank's address, but could not connect to it.",
        "The address may be from an earlier run: remove the file, or use a new name each time.",
    ),
    "operation to complete": (
        "it joined a group, but another rank did not take part in time.",
        START_ALL,
    ),
}
CONSEQUENCES = ("Connection reset", "Connection closed", "Broken pipe")  # of another's failure


def own_words(message: str) -> str:
    """Return PyTorch's message without ports and places in C++, which differ from run to run."""
    without_places = re.sub(r"\[/[^]]*\] |useIpv6: \w+, ", "", message)
    return re.sub(r"\b\d{5}(\$\d+)?(?!\d)", "PORT", without_places)


def explain(error: Exception) -> str:
    """Return what PyTorch meant, in wording that is the same on every run.

    A RankError is explained rank by rank, without ranks that failed only because another one had
    left. For any other error, only its meaning is returned.
    """
    if not isinstance(error, RankError):
        return _meaning(type(error).__name__, str(error))
    followed = {
        rank
        for rank, failure in error.failures.items()
        if any(fragment in failure.message for fragment in CONSEQUENCES)
    }
    ranks_by_meaning: dict[str, list[int]] = {}
    for rank in error.failures.keys() - followed or followed:
        failure = error.failures[rank]
        meaning = _meaning(failure.type, failure.message)
        ranks_by_meaning.setdefault(meaning, []).append(rank)
    return "\n".join(
        f"{name_ranks(ranks)}: {meaning}"
        for meaning, ranks in sorted(ranks_by_meaning.items(), key=lambda item: min(item[1]))
    )


def _meaning(kind: str, message: str) -> str:
    for fragment, (meaning, hint) in MEANINGS.items():
        if fragment in message:
            return f"{meaning}\n    {hint}"
    return f"{kind}, which this lesson does not explain; read its message."


def main(argv: list[str] | None = None) -> None:
    """Form groups in four ways, look into the store, and print one line."""
    options = lesson_parser("init_methods", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace, init=False) as ranks:
        n = ranks.world_size
        proposed = list(ranks(propose_rendezvous))
        points = proposed[0]  # rank 0 decides
        try:
            path = f"{points['folder']}/noted"
            for rank, seen in enumerate(ranks(noted, path)):
                _prove_all_gather(seen, rank, n)
            for worker, point in (
                (by_environment, points["env"]),
                (by_file, f"{points['folder']}/met"),
                (by_tcp, points["tcp"]),
                (by_store, points["store"]),
            ):
                with patch.dict(os.environ):  # under torchrun a worker changes this process's own
                    sums = list(ranks(worker, point))
                prove(f"all ranks met {worker.__name__}", sums == [n * (n - 1) // 2] * n)
        finally:
            for points in proposed:
                shutil.rmtree(points["folder"], ignore_errors=True)
        ranks.say(f"init_methods: {ranks}, met in 4 ways, one address from each in the store")


def _prove_all_gather(seen: dict, rank: int, world_size: int) -> None:
    wrote = [key for call, key, _ in seen["notes"] if call == "set"]
    read = [key for call, key, _ in seen["notes"] if call == "get"]
    prove("a rank writes one key, which ends in its number", ranks_in(wrote) == [rank])
    prove("a rank reads the key of every rank", sorted(ranks_in(read)) == list(range(world_size)))
    prove("a rank wrote an address at which it listens", seen["listens"] != "nothing")
    prove("messages do not go through the store", seen["later"] == 0)


if __name__ == "__main__":
    run_as_script(main)
