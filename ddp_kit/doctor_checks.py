"""Checks of this machine: what works on it, and what may go wrong."""

from __future__ import annotations

import os
import platform
import re
import textwrap
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from ddp_kit import settings
from ddp_kit.backends import count_cores, mpi, shm, threads_per_rank
from ddp_kit.data import load_torchvision_operators
from ddp_kit.error_text import count
from ddp_kit.pool.arguments import CONTROL_GROUP, available_memory, ranks_by_memory
from ddp_kit.pool.pool import living_ranks

WIDTH = 100  # columns; a notebook shows that many without wrapping
OLDEST_PYTORCH = (2, 12)
RANKS = 4  # as many as the lessons use
SMALL = 128 * 2**20  # bytes of shared memory; a container has 64 MiB by default


class Finding(NamedTuple):
    """What one check found, and what follows from it: what it means, or what to do about it."""

    found: str
    consequence: str
    ok: bool = True  # False if it needs the learner's attention


def problem(found: str, consequence: str) -> Finding:
    return Finding(found, consequence, ok=False)


def doctor() -> None:
    """Print what works on this machine and what may go wrong: one line per check, and a summary."""
    report()


def report() -> int:
    """Print the report; return how many lines need attention."""
    found = findings()
    for subject, finding in found.items():
        start = f"{'ok' if finding.ok else 'WARN':<6}{subject:<15}"
        text = f"{start}{finding.found}. {finding.consequence}"
        whole_words = {"break_long_words": False, "break_on_hyphens": False}
        print(textwrap.fill(text, WIDTH, subsequent_indent=" " * len(start), **whole_words))
    problems = sum(not finding.ok for finding in found.values())
    summary = f"{problems} {'line needs' if problems == 1 else 'lines need'} attention."
    print(f"\n{summary if problems else 'No problems found.'}")
    return problems


def findings() -> dict[str, Finding]:
    """Return what every check found, by its subject, in the order of the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings report it, and stderr stays empty
        return {subject: _guard(check) for subject, check in CHECKS.items()}


def _guard(check: Callable[[], Finding]) -> Finding:
    """Return what a check finds, or that it raised an error."""
    try:
        return check()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        return problem(f"the check failed ({why})", "The kit may work nevertheless.")


# --- the checks ------------------------------------------------------------------------------


def pytorch() -> Finding:
    version, cuda = torch.__version__, torch.version.cuda
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_PYTORCH:
        oldest = ".".join(map(str, OLDEST_PYTORCH))
        return problem(version, f"The kit needs PyTorch {oldest} or newer.")
    here = f"{version} on Python {platform.python_version()}"
    if cuda is None:
        return Finding(f"{here}, built without CUDA", "Ranks compute on the CPU.")
    return Finding(f"{here}, built for CUDA {cuda}", "Ranks can use NVIDIA GPUs, if present.")


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
    gpus = torch.cuda.device_count()
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": mpi.missing() is None,
        "shm": shm.missing() is None,
    }
    found = ", ".join(name for name, here in available.items() if here) or "none"
    found += f"; {count(gpus, 'GPU')}"
    if not available["gloo"]:
        return problem(found, "The lessons need gloo: install PyTorch from PyPI or conda.")
    if gpus and not available["nccl"]:
        return problem(found, "This PyTorch has no nccl: ranks use gloo on the CPU.")
    auto = f"nccl for up to {count(gpus, 'rank')}, otherwise gloo" if gpus else "gloo"
    hint = "" if available["mpi"] else ' To use mpi: pip install "ddp_kit[mpi]"'
    return Finding(found, f'No lesson needs a GPU. backend="auto" selects {auto}.{hint}')


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
    return problem(
        found,
        f"Enough for {count(ranks, 'rank')} of {settings.RANK_MEMORY / 1e6:g} MB, but the lessons "
        f"use {RANKS}. The system kills a rank when memory runs out: shut down other notebooks.",
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
            "num_workers=0, or start the container with --shm-size=1g.",
        )
    return Finding(found, "DataLoader workers and nccl use it. The kit and gloo do not.")


CHECKS: dict[str, Callable[[], Finding]] = {
    "PyTorch": pytorch,
    "torchvision": torchvision,
    "backends": backends,
    "cores": cores,
    "memory": memory,
    "shared memory": shared_memory,
}


def _control_group(file: str) -> list[int] | None:
    """Return a container's limit as numbers; None if there is no limit."""
    try:
        return [int(number) for number in (CONTROL_GROUP / file).read_text().split()]
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
