"""MPI as a backend of PyTorch, on the stock PyTorch wheel.

    import torch.distributed as dist
    from ddp_kit.backends import mpi

    mpi.register()
    rank, world_size, _, _ = mpi.rank_info()
    dist.init_process_group(mpi.NAME, store=dist.HashStore(), rank=rank, world_size=world_size)

Start it with `mpiexec -n 4 python program.py`, or from Python with
`[*mpi.mpiexec(4), sys.executable, "program.py"]`.

PyTorch's own backend is called "mpi" and must be compiled in; this one is called "mpi4py".
`init_process_group` loads mpi4py and MPI; importing this package does not.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.distributed as dist

from ddp_kit.backends.mpi import launcher
from ddp_kit.backends.mpi.launcher import (
    environment,
    missing,
    mpiexec,
    rank_info,
    started_by_mpiexec,
)

__all__ = [
    "NAME",
    "environment",
    "load",
    "missing",
    "mpiexec",
    "rank_info",
    "register",
    "started_by_mpiexec",
]

NAME = "mpi4py"


def register() -> None:
    """Register the backend "mpi4py" with PyTorch; a second call does nothing.

    Raises BackendError if mpi4py is not installed.
    """
    launcher.require_package()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def load() -> ModuleType:
    """Import mpi4py.MPI and initialize MPI, which waits until all ranks do so; return the module.

    Raises BackendError if that is not possible.
    """
    from ddp_kit.backends.mpi import lifecycle  # imports the process group, for the recorder

    return lifecycle.initialize()


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    from ddp_kit.backends.mpi.lifecycle import create_group

    return create_group(options)
