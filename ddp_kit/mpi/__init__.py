"""MPI as a backend of PyTorch, on the stock PyTorch wheel.

import torch.distributed as dist
from ddp_kit import mpi

mpi.register()
rank, world_size, _, _ = mpi.place()
dist.init_process_group(mpi.NAME, store=dist.HashStore(), rank=rank, world_size=world_size)

    mpiexec -n 4 python program.py      # or [*mpi.mpiexec(4), sys.executable, "program.py"]

PyTorch has a backend of the name "mpi" of its own, which must be compiled in; this one is called
"mpi4py". mpi4py and MPI are loaded by `init_process_group`, not by an import of this package.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.distributed as dist

from ddp_kit.mpi import command
from ddp_kit.mpi.command import environment, missing, mpiexec, place, started_by_mpiexec

__all__ = [
    "NAME",
    "environment",
    "load",
    "missing",
    "mpiexec",
    "place",
    "register",
    "started_by_mpiexec",
]

NAME = "mpi4py"


def register() -> None:
    """Tell PyTorch of the backend "mpi4py"; a second call does nothing.

    Raises BackendError where mpi4py is not installed.
    """
    command.require_package()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def load() -> ModuleType:
    """Load mpi4py.MPI and the process group; initialise MPI, which waits until all ranks do so.

    Raises BackendError where that cannot be.
    """
    from ddp_kit.mpi import creation, library  # noqa: F401 - who records needs the classes

    return library.load()


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    from ddp_kit.mpi.creation import create_group

    return create_group(options, backend_options)
