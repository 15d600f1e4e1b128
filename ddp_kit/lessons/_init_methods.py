"""Of the lesson on init methods: a store that passes calls on, sockets, and the proof."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from unittest.mock import patch

import psutil
import torch.distributed as dist

from ddp_kit.lessons._launch import Ranks, lesson_main, prove


class ForwardingStore(dist.Store):
    """A store that passes all calls on to another one."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key, value):
        self.store.set(key, value)

    def wait(self, keys, *timeout):
        self.store.wait(keys, *timeout)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, amount):
        return self.store.add(key, amount)

    def check(self, keys):
        return self.store.check(keys)


def ranks_in(keys: Sequence[str]) -> list[int]:
    """Return the ranks at the end of keys such as "0//cpu//0/1"."""
    return [int(key.rsplit("/", 1)[1]) for key in keys]


def free_ports(count: int) -> list[int]:
    """Return ports that are free now; they stay so until somebody listens on them.

    They are below 30000, because outgoing connections get larger ones by themselves. SystemRandom
    leaves the seed of the learner's random numbers alone.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20000, 30000), k=10000):
        if len(found) == count:
            break
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


def own_address(values: Mapping[str, bytes]) -> str | None:
    """Return the address in a store's values on which this process listens, as "127.0.0.1:PORT".

    Returns "nothing" if they contain no such address, and None if the system reports no listener
    of this process. The port differs from run to run, and so it is not shown.
    """
    own = [(ip, port) for ip, port, pid in listeners() if pid == os.getpid()]
    written = b"".join(values.values())
    for ip, port in own:
        packed = socket.inet_pton(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip)
        if packed in written and port.to_bytes(2, "big") in written:
            return f"{ip}:PORT"
    return "nothing" if own else None


def listeners() -> list[tuple[str, int, int | None]]:
    """Return all listeners of this machine: address, port, and process id where it is known.

    Where only an administrator may ask for all of them, return those of this process.
    """
    try:
        found = [(c, c.pid) for c in psutil.net_connections("tcp")]
    except psutil.AccessDenied:
        found = [(c, os.getpid()) for c in psutil.Process().net_connections("tcp")]
    return [(c.laddr.ip, c.laddr.port, pid) for c, pid in found if c.status == psutil.CONN_LISTEN]


@contextmanager
def quiet() -> Iterator[None]:
    """Discard what PyTorch's C++ code writes to stderr, beside the error that it raises."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def own_words(message: str) -> str:
    """Return PyTorch's message without ports and places in C++, which differ from run to run."""
    without_places = re.sub(r"\[/[^]]*\] |useIpv6: \w+, ", "", message)
    return re.sub(r"\b\d{5}(\$\d+)?(?!\d)", "PORT", without_places)


def _propose(rank: int, world_size: int) -> tuple[str, list[int]]:
    return tempfile.mkdtemp(), free_ports(3)


@lesson_main("init_methods", init=False)
def main(ranks: Ranks) -> str:
    """Form groups in four ways, look into the store, and print one line."""
    n = ranks.world_size
    proposed = list(ranks(_propose))
    folder, ports = proposed[0]  # rank 0 decides
    try:
        for rank, seen in enumerate(ranks(lesson.noted, f"{folder}/noted")):
            wrote = [key for call, key, _ in seen["notes"] if call == "set"]
            prove("a rank writes one key, which ends in its number", ranks_in(wrote) == [rank])
            prove("a rank wrote an address at which it listens", seen["listens"] != "nothing")
            prove("messages do not go through the store", seen["later"] == 0)
        workers = lesson.by_environment, lesson.by_tcp, lesson.by_store, lesson.by_file
        for worker, point in zip(workers, [*ports, f"{folder}/met"], strict=True):
            with patch.dict(os.environ):  # under torchrun a worker changes this process's own
                sums = list(ranks(worker, point))
            prove(f"all ranks met {worker.__name__}", sums == [n * (n - 1) // 2] * n)
    finally:
        for path, _ in proposed:
            shutil.rmtree(path, ignore_errors=True)
    return "met in 4 ways, one address from each in the store"


from ddp_kit.lessons import init_methods as lesson
