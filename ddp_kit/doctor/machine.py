"""What the doctor finds in the machine: GPUs, cores, memory, network and files."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ddp_kit.backends import LOOPBACK, count_cores, threads_per_rank
from ddp_kit.doctor.finding import Finding
from ddp_kit.pool.arguments import RANK_MEMORY, most_ranks, ranks_by_files

RANKS = 4  # as many as the lessons use
SMALL = 128 * 2**20  # bytes of shared memory; a container has 64 MiB unless told otherwise
CONTROL_GROUP = Path("/sys/fs/cgroup")
DEVICES = Path("/dev")


def gpus() -> Finding:
    """How many GPUs PyTorch sees, and so how many ranks nccl can have."""
    count = torch.cuda.device_count()
    if count and dist.is_nccl_available():
        return Finding(
            "GPUs",
            str(count),
            f"nccl can have {_many(count, 'rank')}, one on each GPU. More use gloo on the CPU.",
            ok=True,
        )
    if count:
        return Finding(
            "GPUs", f"{count}, without nccl", "Ranks use gloo on the CPU all the same.", ok=False
        )
    hidden = sum(path.name[6:].isdigit() for path in DEVICES.glob("nvidia*"))
    if hidden:
        return Finding(
            "GPUs",
            f"{hidden}, and PyTorch sees none of them",
            "Ranks use gloo on the CPU. PyTorch is built without CUDA, the driver is too old, or "
            "CUDA_VISIBLE_DEVICES hides them.",
            ok=False,
        )
    return Finding("GPUs", "none", "Ranks use gloo on the CPU; no lesson needs more.", ok=True)


def cores() -> Finding:
    """How many cores there are, and how many threads a rank gets."""
    count = count_cores()
    found = _many(count, "core")
    quota = _control_group("cpu.max")
    if quota and quota[0] < count * quota[1]:
        return Finding(
            "cores",
            f"{found}, of which this container may use {quota[0] / quota[1]:g}",
            "Ranks get more threads than that, and slow down. Call torch.set_num_threads(1) in "
            "the worker.",
            ok=False,
        )
    if count == 1:
        return Finding(
            "cores", found, "Ranks take turns on it: results hold, times say nothing.", ok=False
        )
    two, four = (_many(threads_per_rank(ranks), "thread") for ranks in (2, RANKS))
    says = f"Each of 2 ranks gets {two}, each of {RANKS} gets {four}."
    if count < RANKS:
        says += f" {RANKS} ranks take turns: slower, not wrong."
    return Finding("cores", found, says, ok=True)


def memory() -> Finding:
    """How much memory is free, and how many ranks it can hold."""
    whole, free = psutil.virtual_memory()[:2]
    found = f"{_size(free)} free of {_size(whole)}"
    limit = _control_group("memory.max")
    if limit and limit[0] < whole:
        free = min(free, limit[0])
        found += f", of which this container may use {_size(limit[0])}"
    room = int(free / RANK_MEMORY)
    if room < RANKS:
        return Finding(
            "memory",
            found,
            f"{_many(room, 'rank')} fit in, at {RANK_MEMORY / 1e6:g} MB each, and the lessons use "
            f"{RANKS}. The system kills a rank when memory runs out: close other notebooks.",
            ok=False,
        )
    return Finding(
        "memory", found, f"{room} ranks fit in now; kit.run allows {most_ranks()}.", ok=True
    )


def shared_memory() -> Finding:
    """How much can be shared through /dev/shm, and who needs that."""
    space = shared_space()
    if space is None:
        return Finding("shared memory", "no /dev/shm", "The kit needs none.", ok=True)
    size, free = space
    found = f"{_size(free)} free of {_size(size)}"
    if free < SMALL:
        return Finding(
            "shared memory",
            found,
            "DataLoader workers may die of a bus error, and nccl may not start. Use num_workers=0, "
            "or start the container with --shm-size=1g. The kit and gloo use none.",
            ok=False,
        )
    says = "DataLoader workers and nccl use it. The kit and gloo do not."
    return Finding("shared memory", found, says, ok=True)


def shared_space() -> tuple[int, int] | None:
    """Return the size of /dev/shm and what is free of it, in bytes; None if there is none."""
    try:
        space = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return None
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def loopback() -> Finding:
    """Whether gloo's interface is there, and lets a message through."""
    if LOOPBACK not in (interface for _, interface in socket.if_nameindex()):
        return Finding(
            "loopback", f"no interface {LOOPBACK}", "gloo cannot connect the ranks.", ok=False
        )
    try:
        knock()
    except OSError as error:
        return Finding(
            "loopback",
            f"{LOOPBACK} lets nothing through ({error.strerror or error})",
            "gloo cannot connect the ranks: look at the firewall, or at the container's network.",
            ok=False,
        )
    return Finding(
        "loopback", f"{LOOPBACK} works", "gloo connects the ranks through it alone.", ok=True
    )


def knock(seconds: float = 1.0) -> None:
    """Connect to a port of our own on 127.0.0.1; raise OSError if that cannot be had."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(seconds)
        with socket.create_connection(server.getsockname(), seconds):
            server.accept()[0].close()


def open_files() -> Finding:
    """How many files may be open, and how many ranks that allows."""
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "no limit", "Any number of ranks can be had.", ok=True)
    ranks = ranks_by_files(limit)
    found = f"{limit} at a time"
    if ranks < RANKS:
        return Finding(
            "open files",
            found,
            f"Enough for {_many(ranks, 'rank')}, and the lessons use {RANKS}. Run `ulimit -n 1024` "
            "before you start Jupyter.",
            ok=False,
        )
    return Finding("open files", found, f"Enough for {ranks} ranks.", ok=True)


def temporary_folder() -> Finding:
    """Whether a private folder can be made where the ranks meet, and a file in it be locked."""
    import fcntl  # not on Windows

    try:
        with tempfile.TemporaryDirectory(prefix="ddp_kit_doctor-") as folder:
            private = stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            with open(Path(folder, "lock"), "wb") as file:
                file.write(b"x")
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Finding(
            "temporary folder",
            f"cannot be used ({error.strerror or error})",
            "Ranks meet in a locked file there, and cannot start: set TMPDIR to a folder on a "
            "local disk with free space.",
            ok=False,
        )
    if not private:
        return Finding(
            "temporary folder",
            "open to others",
            "This file system keeps no permissions: set TMPDIR to a folder on a local disk.",
            ok=False,
        )
    return Finding(
        "temporary folder",
        "private, with locks",
        "Ranks meet in a file there, on no port.",
        ok=True,
    )


def _control_group(file: str) -> list[int] | None:
    """Return a container's limit as numbers; None where nothing is limited."""
    try:
        return [int(number) for number in (CONTROL_GROUP / file).read_text().split()]
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _size(count: float) -> str:
    """Write bytes as MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
