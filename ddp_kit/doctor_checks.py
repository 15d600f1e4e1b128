"""Checks of this machine: what works on it, and what may go wrong."""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import re
import resource
import socket
import stat
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from ddp_kit import settings
from ddp_kit.backends import LOOPBACK, count_cores, mpi, shm, threads_per_rank
from ddp_kit.data import load_torchvision_operators
from ddp_kit.error_text import count
from ddp_kit.pool.arguments import available_memory, ranks_by_files, ranks_by_memory
from ddp_kit.pool.pool import living_ranks

TIMEOUT = 5.0  # seconds; a driver or a network folder that hangs may take no longer
WIDTH = 100  # columns; a notebook shows that many without wrapping
OLDEST_PYTORCH = (2, 12)
RANKS = 4  # as many as the lessons use
SMALL = 128 * 2**20  # bytes of shared memory; a container has 64 MiB by default
CONTROL_GROUP = Path("/sys/fs/cgroup")
DEVICES = Path("/dev")


class Finding(NamedTuple):
    """What one check found, and what follows from it: what it means, or what to do about it."""

    found: str
    consequence: str
    ok: bool = True  # False if it needs the learner's attention


def problem(found: str, consequence: str) -> Finding:
    return Finding(found, consequence, ok=False)


def doctor() -> None:
    """Print what works on this machine and what may go wrong: one line per check, and a summary."""
    print(format_report(findings()))


def main(argv: list[str] | None = None) -> int:
    """Print the report; return 1 if a line needs attention, else 0."""
    argparse.ArgumentParser(
        prog="python -m ddp_kit.doctor",
        description="Check this machine: print what works on it and what may go wrong.",
        epilog="The exit code is 1 if a line needs attention, else 0. In a notebook: kit.doctor()",
    ).parse_args(argv)
    found = findings()
    print(format_report(found))
    return int(not all(finding.ok for finding in found.values()))


def findings() -> dict[str, Finding]:
    """Return what every check found, by its subject, in the order of the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings report it, and stderr stays empty
        found = {subject: run_check(check) for subject, check in CHECKS.items()}
    # In this thread: one of its own would never be the main thread.
    return found | {"main thread": guard(main_thread)}


def run_check(check: Callable[[], Finding], timeout: float = TIMEOUT) -> Finding:
    """Return what a check finds, or that it raised an error or took longer than `timeout`."""
    results = [_failed(f"no result within {timeout:g} s")]
    # Some checks call into the system, where only another thread can stop waiting for them.
    thread = threading.Thread(target=lambda: results.append(guard(check)), daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        return _failed(str(error))
    thread.join(timeout)
    return results[-1]


def guard(check: Callable[[], Finding]) -> Finding:
    """Return what a check finds in this thread, or that it raised an error."""
    try:
        return check()
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error}".rstrip(": "))


def _failed(reason: str) -> Finding:
    return problem(f"the check failed ({reason})", "The kit may work nevertheless.")


def format_report(found: Mapping[str, Finding]) -> str:
    """Return the findings as aligned lines, and how many need attention."""
    lines = []
    for subject, finding in found.items():
        start = f"{'ok' if finding.ok else 'WARN':<6}{subject:<18}"
        text = f"{start}{finding.found}. {finding.consequence}"
        whole_words = {"break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * len(start), **whole_words)
    problems = sum(not finding.ok for finding in found.values())
    summary = f"{problems} {'line needs' if problems == 1 else 'lines need'} attention."
    return "\n".join([*lines, "", summary if problems else "No problems found."])


# --- the checks ------------------------------------------------------------------------------


def python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()}"
    return Finding(found, "Every rank is a separate process of this Python.")


def pytorch() -> Finding:
    version, cuda = torch.__version__, torch.version.cuda
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_PYTORCH:
        oldest = ".".join(map(str, OLDEST_PYTORCH))
        return problem(version, f"The kit needs PyTorch {oldest} or newer.")
    if cuda is None:
        return Finding(f"{version}, built without CUDA", "Ranks compute on the CPU.")
    return Finding(f"{version}, built for CUDA {cuda}", "Ranks can use NVIDIA GPUs, if present.")


def torchvision() -> Finding:
    """Check torchvision without importing it, which may fail or take seconds."""
    try:
        version = metadata.version("torchvision")
        required = " ".join(metadata.requires("torchvision") or ())
    except metadata.PackageNotFoundError:
        return problem(
            "not installed",
            "kit.mnist and the lessons that train on digits need it: pip install torchvision",
        )
    here = torch.__version__
    wanted = re.search(r"\btorch\s*\(?==\s*([\w.]+)", required)
    if wanted and wanted[1] != here.split("+")[0]:
        return problem(
            f"{version} is for torch {wanted[1]}, but torch {here} is installed",
            f"Importing it may fail. Install the torchvision for torch {here}.",
        )
    if not load_torchvision_operators():
        return problem(
            f"{version}, built for another build of PyTorch than {here}",
            "All lessons work; where you import torchvision yourself, import ddp_kit first. Only "
            "torchvision.ops and torchvision.io do not work: to use them, install torchvision "
            "from where torch came from, such as https://download.pytorch.org/whl/cpu.",
        )
    return Finding(f"{version}, built for this PyTorch", "All of it works.")


def backends() -> Finding:
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": mpi.missing() is None,
        "shm": shm.missing() is None,
    }
    found = ", ".join(name for name, here in available.items() if here) or "none"
    if unavailable := ", ".join(name for name, here in available.items() if not here):
        found += f" (unavailable: {unavailable})"
    if not available["gloo"]:
        return problem(found, "The lessons need gloo: install PyTorch from PyPI or conda.")
    auto = "nccl if every rank has its own GPU, otherwise gloo" if available["nccl"] else "gloo"
    hint = "" if available["mpi"] else ' To use mpi: pip install "ddp_kit[mpi]"'
    return Finding(found, f'backend="auto" selects {auto}.{hint}')


def gpus() -> Finding:
    seen = torch.cuda.device_count()
    if seen and dist.is_nccl_available():
        most = f"nccl supports up to {count(seen, 'rank')}, one per GPU."
        return Finding(str(seen), f"{most} More ranks use gloo on the CPU.")
    if seen:
        return problem(
            f"{seen}, but this PyTorch has no nccl",
            'Ranks use gloo on the CPU, or on the GPUs with backend="cuda:gloo".',
        )
    if hidden := sum(path.name[6:].isdigit() for path in DEVICES.glob("nvidia*")):
        return problem(
            f"{hidden} in the machine, but PyTorch sees none",
            "Ranks use gloo on the CPU. PyTorch is built without CUDA, the driver is too old, or "
            "CUDA_VISIBLE_DEVICES hides them.",
        )
    return Finding("none", "Ranks use gloo on the CPU. No lesson needs a GPU.")


def cores() -> Finding:
    total = count_cores()
    found = count(total, "core")
    quota = _control_group("cpu.max")
    if quota and quota[0] < total * quota[1]:
        return problem(
            f"{found}, but this container is limited to {quota[0] / quota[1]:g}",
            "Ranks start more threads than that (oversubscription), which slows them down: call "
            "torch.set_num_threads(1) in the worker.",
        )
    if total == 1:
        return problem(found, "All ranks share it: results are correct, but timings mean nothing.")
    two, four = (count(threads_per_rank(ranks), "thread") for ranks in (2, RANKS))
    shared = f" {RANKS} ranks share {total} cores (oversubscription): slower, but correct."
    each = f"2 ranks get {two} each, {RANKS} ranks get {four} each."
    return Finding(found, each + (shared if total < RANKS else ""))


def memory() -> Finding:
    total, free = psutil.virtual_memory().total, available_memory()
    found = f"{_size(free)} free of {_size(total)}"
    limit = _control_group("memory.max")
    if limit and limit[0] < total:
        found = f"{_size(free)} free of the {_size(limit[0])} to which this container is limited"
    ranks = ranks_by_memory(living_ranks())
    if ranks >= RANKS and free < settings.WARM_START_MEMORY:
        return problem(
            found,
            f"Enough for {ranks} ranks that do little, but {RANKS} ranks that train need up to "
            f"{_size(settings.WARM_START_MEMORY)}, as in lesson 08: call kit.run(worker, "
            "world_size=2) there. No ranks start in the background.",
        )
    if ranks >= RANKS:
        return Finding(found, f"Enough for {ranks} ranks now, the most that kit.run starts.")
    fewer = f"call kit.run(worker, world_size={ranks}), or " if ranks > 1 else ""
    return problem(
        found,
        f"Enough for {count(ranks, 'rank')} of {settings.RANK_MEMORY / 1e6:g} MB, but the lessons "
        f"use {RANKS}. The system kills a rank when memory runs out: {fewer}shut down other "
        "notebooks.",
    )


def shared_memory() -> Finding:
    try:
        space = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return Finding("no /dev/shm", "The kit does not need it.")
    size, free = (blocks * space.f_frsize for blocks in (space.f_blocks, space.f_bavail))
    found = f"{_size(free)} free of {_size(size)}"
    if free < SMALL:
        return problem(
            found,
            "DataLoader workers may die of a bus error, and nccl may fail to start: use "
            "num_workers=0, or start the container with --shm-size=1g. The kit and gloo do not "
            "use it.",
        )
    return Finding(found, "DataLoader workers and nccl use it. The kit and gloo do not.")


def loopback() -> Finding:
    if LOOPBACK not in (interface for _, interface in socket.if_nameindex()):
        up = f"enable it, on Linux with `ip link set {LOOPBACK} up`."
        return problem(f"no interface {LOOPBACK}", f"gloo cannot connect the ranks: {up}")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(1.0)
            with socket.create_connection(server.getsockname(), 1.0):
                server.accept()[0].close()
    except OSError as error:
        return problem(
            f"no connection through {LOOPBACK} ({error.strerror or error})",
            "gloo cannot connect the ranks: check the firewall, or the container's network.",
        )
    return Finding(f"{LOOPBACK} works", "gloo connects the ranks through it only.")


def open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Finding("no limit", "Enough for any number of ranks.")
    ranks = ranks_by_files()
    if ranks < RANKS:
        raise_it = "run `ulimit -n 1024` before starting Jupyter."
        enough = f"Enough for {count(ranks, 'rank')}, but the lessons use {RANKS}: {raise_it}"
        return problem(f"at most {limit}", enough)
    return Finding(f"at most {limit}", f"Enough for {ranks} ranks.")


def temporary_folder() -> Finding:
    """Check that the ranks can rendezvous: with a locked file in a private temporary folder."""
    try:
        with tempfile.TemporaryDirectory(prefix="ddp_kit_doctor-") as folder:
            private = stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            with open(Path(folder, "lock"), "wb") as file:
                file.write(b"x")
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return problem(
            f"unusable ({error.strerror or error})",
            "Ranks cannot start, because their rendezvous is a locked file there: set TMPDIR to a "
            "folder on a local disk with free space.",
        )
    if not private:
        ignores = "This file system ignores permissions: set TMPDIR to a folder on a local disk."
        return problem("accessible to other users", ignores)
    then = "The ranks' rendezvous is a file there and needs no port."
    return Finding("private, and supports file locks", then)


def main_thread() -> Finding:
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return Finding("this is it", "Ranks can be started from here.")
    return problem(
        f"this is the thread {thread.name!r}",
        "Ranks can only be started from the main thread: call kit.run directly in a cell.",
    )


CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": python,
    "PyTorch": pytorch,
    "torchvision": torchvision,
    "backends": backends,
    "GPUs": gpus,
    "cores": cores,
    "memory": memory,
    "shared memory": shared_memory,
    "loopback": loopback,
    "open files": open_files,
    "temporary folder": temporary_folder,
}


def _control_group(file: str) -> list[int] | None:
    """Return a container's limit as numbers; None if there is no limit."""
    try:
        return [int(number) for number in (CONTROL_GROUP / file).read_text().split()]
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
