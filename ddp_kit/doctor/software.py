"""What the doctor finds in this process and in the packages it imports."""

from __future__ import annotations

import platform
import re
import sys
import threading
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_kit import mpi
from ddp_kit.doctor.finding import Finding

OLDEST_PYTHON = (3, 10)
OLDEST_PYTORCH = (2, 12)


def python() -> Finding:
    """Whether this Python, on this system, is one that the kit is made for."""
    found = f"{platform.python_version()} on {platform.system()}"
    if sys.platform == "win32":
        return Finding("Python", found, "The kit needs Linux or macOS: use WSL.", ok=False)
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("Python", found, f"The kit needs {_dotted(OLDEST_PYTHON)}.", ok=False)
    return Finding("Python", found, "Every rank is a process of its own with this Python.", ok=True)


def pytorch() -> Finding:
    """Whether PyTorch is new enough, and what it is built for."""
    version = torch.__version__
    if _numbers(version) < OLDEST_PYTORCH:
        return Finding(
            "PyTorch", version, f"The kit needs {_dotted(OLDEST_PYTORCH)} or newer.", ok=False
        )
    if torch.version.cuda is None:
        return Finding(
            "PyTorch", f"{version}, a build without CUDA", "Ranks compute on the CPU.", ok=True
        )
    return Finding(
        "PyTorch",
        f"{version}, built for CUDA {torch.version.cuda}",
        "Ranks can use NVIDIA GPUs, where there are any.",
        ok=True,
    )


def torchvision() -> Finding:
    """Whether torchvision is there and made for this PyTorch; does not import it."""
    try:
        version = metadata.version("torchvision")
        required = " ".join(metadata.requires("torchvision") or ())
    except metadata.PackageNotFoundError:
        return Finding(
            "torchvision",
            "not installed",
            "kit.mnist and the lessons on digits need it: pip install torchvision",
            ok=False,
        )
    wanted = re.search(r"\btorch\s*\(?==\s*([\w.]+)", required)
    if wanted and wanted[1] != torch.__version__.split("+")[0]:
        return Finding(
            "torchvision",
            f"{version}, which is made for torch {wanted[1]}, beside torch {torch.__version__}",
            f"Its import may fail. Install the torchvision made for torch {torch.__version__}.",
            ok=False,
        )
    if not operators_load():
        return Finding(
            "torchvision",
            f"{version}, whose operators cannot be loaded into torch {torch.__version__}",
            "It is built for another PyTorch, such as one with CUDA. kit.mnist, datasets, "
            "transforms and models work all the same, if ddp_kit is imported first. "
            "torchvision.ops and torchvision.io do not: for these, install both packages from one "
            "index.",
            ok=False,
        )
    return Finding("torchvision", f"{version}, made for this PyTorch", "All of it works.", ok=True)


def operators_load() -> bool:
    """Load torchvision's operators into PyTorch, as its import would; return whether they did."""
    # PathFinder, because find_spec would call the kit's own import hook (ddp_kit.data).
    spec = PathFinder.find_spec("torchvision")
    folders = spec.submodule_search_locations if spec else None
    library = next(Path(folders[0]).glob("_C*.so"), None) if folders else None
    if library is None:
        return False
    try:
        torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


def backends() -> Finding:
    """Which backends can be had here."""
    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": mpi.missing() is None,
    }
    had = ", ".join(name for name, has in there.items() if has) or "none"
    lacking = ", ".join(name for name, has in there.items() if not has)
    found = f"{had} (not {lacking})" if lacking else had
    if not there["gloo"]:
        return Finding(
            "backends",
            found,
            "The lessons need gloo: install PyTorch from PyPI or conda.",
            ok=False,
        )
    nccl = "nccl where every rank has a GPU of its own, else gloo" if there["nccl"] else "gloo"
    cure = "" if there["mpi"] else ' pip install "ddp_kit[mpi]" brings mpi.'
    return Finding("backends", found, f'backend="auto" is {nccl}.{cure}', ok=True)


def cuda() -> Finding:
    """Whether this process has used a GPU already; the ranks do not mind."""
    if torch.cuda.is_initialized():
        return Finding(
            "CUDA",
            "in use by this process",
            "The ranks do not mind: they are spawned, not forked, and start CUDA anew.",
            ok=True,
        )
    return Finding(
        "CUDA",
        "not in use by this process",
        "It would do no harm: ranks are spawned, not forked.",
        ok=True,
    )


def main_thread() -> Finding:
    """Whether the thread that asks may start ranks."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return Finding("main thread", "this is it", "Ranks can be started from here.", ok=True)
    return Finding(
        "main thread",
        f"this is another, {thread.name!r}",
        "Ranks can be started from the main thread only: call kit.run from a cell.",
        ok=False,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
