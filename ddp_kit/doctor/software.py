"""The doctor's checks of Python, the installed packages and this process."""

from __future__ import annotations

import platform
import re
import sys
import threading
from importlib import metadata

import torch
import torch.distributed as dist

from ddp_kit import mpi
from ddp_kit.data import load_torchvision_operators
from ddp_kit.doctor.report import Finding

OLDEST_PYTHON = (3, 10)
OLDEST_PYTORCH = (2, 12)


def python() -> Finding:
    """Check that the kit supports this Python on this system."""
    found = f"{platform.python_version()} on {platform.system()}"
    if sys.platform == "win32":
        return Finding("Python", found, "The kit needs Linux or macOS: use WSL.", ok=False)
    if sys.version_info[:2] < OLDEST_PYTHON:
        oldest = _dotted(OLDEST_PYTHON)
        return Finding("Python", found, f"The kit needs Python {oldest} or newer.", ok=False)
    return Finding("Python", found, "Every rank is a separate process of this Python.")


def pytorch() -> Finding:
    """Check that PyTorch is new enough, and what it is built for."""
    version = torch.__version__
    if _numbers(version) < OLDEST_PYTORCH:
        oldest = _dotted(OLDEST_PYTORCH)
        return Finding("PyTorch", version, f"The kit needs PyTorch {oldest} or newer.", ok=False)
    cuda = torch.version.cuda
    if cuda is None:
        return Finding("PyTorch", f"{version}, built without CUDA", "Ranks compute on the CPU.")
    return Finding(
        "PyTorch", f"{version}, built for CUDA {cuda}", "Ranks can use NVIDIA GPUs, if present."
    )


def torchvision() -> Finding:
    """Check that torchvision is installed and matches PyTorch, without importing it."""
    try:
        version = metadata.version("torchvision")
        required = " ".join(metadata.requires("torchvision") or ())
    except metadata.PackageNotFoundError:
        return Finding(
            "torchvision",
            "not installed",
            "kit.mnist and the lessons that train on digits need it: pip install torchvision",
            ok=False,
        )
    wanted = re.search(r"\btorch\s*\(?==\s*([\w.]+)", required)
    if wanted and wanted[1] != torch.__version__.split("+")[0]:
        return Finding(
            "torchvision",
            f"{version} is for torch {wanted[1]}, but torch {torch.__version__} is installed",
            f"Importing it may fail. Install the torchvision for torch {torch.__version__}.",
            ok=False,
        )
    if not load_torchvision_operators():
        return Finding(
            "torchvision",
            f"{version}, whose operators cannot be loaded into torch {torch.__version__}",
            "It was built for another build of PyTorch, such as one with CUDA. kit.mnist, "
            "datasets, transforms and models work if ddp_kit is imported first. torchvision.ops "
            "and torchvision.io do not work: to use them, install both packages from one index.",
            ok=False,
        )
    return Finding("torchvision", f"{version}, built for this PyTorch", "All of it works.")


def backends() -> Finding:
    """Check which backends are available."""
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": mpi.missing() is None,
    }
    found = ", ".join(name for name, here in available.items() if here) or "none"
    if unavailable := ", ".join(name for name, here in available.items() if not here):
        found += f" (unavailable: {unavailable})"
    if not available["gloo"]:
        hint = "The lessons need gloo: install PyTorch from PyPI or conda."
        return Finding("backends", found, hint, ok=False)
    auto = "nccl if every rank has its own GPU, otherwise gloo" if available["nccl"] else "gloo"
    hint = "" if available["mpi"] else ' To use mpi: pip install "ddp_kit[mpi]"'
    return Finding("backends", found, f'backend="auto" selects {auto}.{hint}')


def cuda() -> Finding:
    """Check whether this process has initialized CUDA, which is no problem for the ranks."""
    if torch.cuda.is_initialized():
        return Finding(
            "CUDA",
            "initialized in this process",
            "That is no problem: ranks are spawned, not forked, and initialize CUDA themselves.",
        )
    return Finding(
        "CUDA",
        "not initialized in this process",
        "It would be no problem: ranks are spawned, not forked.",
    )


def main_thread() -> Finding:
    """Check that the calling thread may start ranks."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return Finding("main thread", "this is it", "Ranks can be started from here.")
    return Finding(
        "main thread",
        f"this is the thread {thread.name!r}",
        "Ranks can only be started from the main thread: call kit.run directly in a cell.",
        ok=False,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
