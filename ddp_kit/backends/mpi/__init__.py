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

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ddp_kit.errors import BackendError

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
INSTALL = 'pip install "ddp_kit[mpi]"'

# The environment variables for rank, world size, local rank and local world size: as set by
# Open MPI, by MPICH (with Intel MPI), and by any PMIx launcher.
_VARIABLES = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)


def register() -> None:
    """Register the backend "mpi4py" with PyTorch; a second call does nothing.

    Raises BackendError if mpi4py is not installed.
    """
    if problem := _missing_package():
        raise BackendError(problem)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    from ddp_kit.backends.mpi.process_group import create_group

    return create_group(options)


def load() -> ModuleType:
    """Import mpi4py.MPI and initialize MPI, which waits until all ranks do so; return the module.

    Raises BackendError if that is not possible.
    """
    from ddp_kit.backends.mpi.process_group import initialize

    return initialize()


def missing() -> str | None:
    """Return what is missing to run MPI here and how to install it; None if nothing is."""
    return _missing_package() or _missing_mpiexec()


def _missing_package() -> str | None:
    if importlib.util.find_spec("mpi4py"):
        return None
    return f'backend="mpi" needs mpi4py, which is not installed; {INSTALL}'


def _missing_mpiexec() -> str | None:
    if _find_mpiexec():
        return None
    return f'backend="mpi" needs the command mpiexec, which is not installed; {INSTALL}'


@functools.cache
def load_mpi() -> ModuleType:
    """Import and return mpi4py.MPI; `load` initializes MPI.

    Raises BackendError if mpi4py or the MPI library cannot be loaded.
    """
    if problem := _missing_package():
        raise BackendError(problem)
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=False, thread_level="multiple")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendError(f"mpi4py cannot load an MPI library ({reason}); {INSTALL}") from None
    return MPI


def mpiexec(world_size: int) -> list[str]:
    """Return the command line that starts `world_size` ranks; append a program and its arguments.

    The mpiexec beside this Python is preferred to one on the PATH. Run the command with
    `environment()` added to the environment.
    Raises BackendError if there is no mpiexec.
    """
    path = _find_mpiexec()
    if path is None:
        raise BackendError(_missing_mpiexec())
    return [path, "-n", str(world_size)]


def environment() -> dict[str, str]:
    """Return what to add to the environment of mpiexec, for ranks on this machine.

    It makes Open MPI use shared memory only: no rank opens a port, and starting takes a second
    less. Ranks may outnumber the cores, and no rank is bound to a core. Open MPI runs as root only
    if two variables confirm it. Variables that are already set are left out.
    """
    wanted = {"OMPI_MCA_btl": "self,sm", "OMPI_MCA_pml": "ob1"}
    wanted |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    wanted |= {"PRTE_MCA_hwloc_default_binding_policy": "none"}
    wanted |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}  # before Open MPI 5
    if os.geteuid() == 0:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def started_by_mpiexec() -> bool:
    """Return whether mpiexec, or another MPI launcher, started this process."""
    return any(names[0] in os.environ and names[1] in os.environ for names in _VARIABLES)


def rank_info() -> tuple[int, int, int, int]:
    """Return (rank, world_size, local_rank, local_world_size), as the MPI launcher set them.

    If the launcher sets no local rank, all ranks are assumed to run on this machine.
    Raises BackendError if no MPI launcher started this process.
    """
    for names in _VARIABLES:
        rank, world_size, local_rank, local_size = map(os.environ.get, names)
        if rank is not None and world_size is not None:
            if local_rank is None or local_size is None:
                local_rank, local_size = rank, world_size
            return int(rank), int(world_size), int(local_rank), int(local_size)
    raise BackendError(
        "no MPI launcher set the rank and world size of this process; start the ranks with mpiexec"
    )


def _find_mpiexec() -> str | None:
    # Not resolved: a virtual environment's Python is a link to one elsewhere.
    beside = Path(sys.executable).absolute().parent
    return shutil.which("mpiexec", path=str(beside)) or shutil.which("mpiexec")
