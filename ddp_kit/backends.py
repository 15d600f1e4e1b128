"""Which backend and which device the ranks of a run get."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from ddp_kit import mpi
from ddp_kit.errors import BackendError

NAMES = ("auto", "gloo", "nccl", "cuda:gloo", "mpi")
ON_GPUS = ("nccl", "cuda:gloo")

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the interface that leads nowhere else

# What keeps gloo and nccl of a process unseen by the network.
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}

_device = torch.device("cpu")


def choose_backend(backend: str, world_size: int) -> str:
    """Turn "auto" into a backend, and refuse one that cannot run here.

    "auto" is nccl where every rank can have a GPU of its own, else gloo. "cuda:gloo" is gloo for
    tensors on GPUs, which ranks may share.
    Raises BackendError with what would be needed.
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
    lacking = mpi.missing() if backend == "mpi" else None
    if lacking:
        raise BackendError(lacking)
    return backend


def _hint(backend: object) -> str:
    """Say what is probably meant by a name that the kit has not, or what else to do."""
    name = str(backend).lower()
    if name in NAMES:
        return f'; write "{name}"'
    if name == "cpu:gloo,cuda:nccl":
        return '; "nccl" moves tensors on the CPU by gloo already'
    if name in dist.Backend.backend_list:
        return "; another one needs ranks that form their own group, in WorkerPool(init=False)"
    return ""


def for_group(backend: str) -> str:
    """Return what `init_process_group` is told: gloo also serves the tensors on the CPU.

    "mpi" is PyTorch's own where it was compiled in, else that of `ddp_kit.mpi`.
    """
    if backend == "mpi" and not dist.is_mpi_available():
        mpi.register()
        return mpi.NAME
    return {"nccl": "cpu:gloo,cuda:nccl", "cuda:gloo": "cpu:gloo,cuda:gloo"}.get(backend, backend)


def take_device(backend: str, local_rank: int) -> torch.device:
    """Make this process's device current: a GPU for a backend ON_GPUS, else the CPU."""
    global _device
    if backend in ON_GPUS:
        # Under nccl there is a GPU for every rank; under gloo they take turns.
        _device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(_device)
    else:
        _device = torch.device("cpu")
    return _device


def device() -> torch.device:
    """Return the device of the rank that calls: `cuda:k` under "nccl" and "cuda:gloo", or `cpu`."""
    return _device


def count_cores() -> int:
    """Return how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def threads_per_rank(world_size: int) -> int:
    """Return one rank's share of the cores, at least one."""
    return max(1, count_cores() // world_size)


def share_cores(world_size: int) -> None:
    """Have this process compute on its share of the machine's cores."""
    torch.set_num_threads(threads_per_rank(world_size))
