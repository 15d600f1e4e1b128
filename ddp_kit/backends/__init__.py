"""The backend, device and cores of each rank."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from ddp_kit.backends import mpi, shm
from ddp_kit.errors import BackendError

NAMES = ("auto", "gloo", "nccl", "cuda:gloo", "mpi", "shm")
ON_GPUS = ("nccl", "cuda:gloo")

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the interface that stays on this machine

# With these variables set, gloo and nccl of a process are not reachable from the network.
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}

_device = torch.device("cpu")


def choose_backend(backend: str, world_size: int) -> str:
    """Return the backend to use: `backend` itself, or what "auto" selects on this machine.

    "auto" selects nccl if every rank can have its own GPU, otherwise gloo. "cuda:gloo" is gloo for
    tensors on GPUs, which ranks may share.
    Raises BackendError, with what would be needed, if the backend is unknown or unavailable.
    """
    if backend not in NAMES:
        known = ", ".join(f'"{name}"' for name in NAMES)
        raise BackendError(f"backend must be one of {known}, got {backend!r}{_hint(backend)}")
    gpus = torch.cuda.device_count()
    if backend == "auto":
        return "nccl" if gpus >= world_size and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not dist.is_nccl_available():
        raise BackendError(
            'backend="nccl" needs a PyTorch built for CUDA, and this one is not; '
            'use backend="gloo", which runs on the CPU'
        )
    if backend == "nccl" and gpus < world_size:
        raise BackendError(
            f'backend="nccl" needs one GPU for each of the {world_size} ranks, and this machine '
            f'has {gpus}; use backend="gloo"'
            + (f', backend="cuda:gloo" on shared GPUs, or world_size={gpus}' if gpus else "")
        )
    if backend == "cuda:gloo" and not gpus:
        raise BackendError(
            'backend="cuda:gloo" needs a GPU, and PyTorch sees none here; use backend="gloo"'
        )
    if backend == "mpi" and (missing := mpi.missing()):
        raise BackendError(missing)
    if backend == "shm" and (missing := shm.missing()):
        raise BackendError(missing)
    return backend


def _hint(backend: object) -> str:
    """Return the hint for an unknown backend: what was probably meant, or what else to do."""
    name = str(backend).lower()
    if name in NAMES:
        return f'; write "{name}"'
    if name == "cpu:gloo,cuda:nccl":
        return '; write "nccl", which includes gloo for tensors on the CPU'
    if name in dist.Backend.backend_list:
        return "; for another one, call init_process_group yourself in a WorkerPool(init=False)"
    return ""


def for_group(backend: str) -> str:
    """Return the backend for `init_process_group`, which includes gloo for tensors on the CPU.

    "mpi" is PyTorch's own if it was compiled in, else that of `mpi`; "shm" is that of `shm`.
    """
    if backend == "mpi" and not dist.is_mpi_available():
        mpi.register()
        return mpi.NAME
    if backend == "shm":
        shm.register()
    return {"nccl": "cpu:gloo,cuda:nccl", "cuda:gloo": "cpu:gloo,cuda:gloo"}.get(backend, backend)


def take_device(backend: str, local_rank: int) -> torch.device:
    """Make this process's device current: a GPU for a backend ON_GPUS, else the CPU; return it."""
    global _device
    if backend in ON_GPUS:
        # With nccl there is a GPU for every rank; with gloo they may share GPUs.
        _device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(_device)
    else:
        _device = torch.device("cpu")
    return _device


def device() -> torch.device:
    """Return the calling rank's device: `cuda:k` with "nccl" and "cuda:gloo", else `cpu`."""
    return _device


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def threads_per_rank(world_size: int) -> int:
    """Return the number of cores for each rank, at least one."""
    return max(1, count_cores() // world_size)


def share_cores(world_size: int) -> None:
    """Limit PyTorch in this process to its share of the cores."""
    torch.set_num_threads(threads_per_rank(world_size))
