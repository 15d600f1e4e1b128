"""The command that starts ranks, and what it told this process. Nothing here loads MPI."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ddp_kit.errors import BackendError

_CURE = 'pip install "ddp_kit[mpi]"'

# What Open MPI, MPICH (with Intel MPI and Microsoft MPI) and any PMIx launcher tell a process:
# rank, world size, local rank, local world size.
_VARIABLES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)


def missing() -> str | None:
    """Say in one sentence what MPI lacks here, and the cure; None: nothing."""
    return _missing_package() or _missing_mpiexec()


def require_package() -> None:
    """Raise BackendError where mpi4py is not installed. It is not imported."""
    lacking = _missing_package()
    if lacking:
        raise BackendError(lacking)


def _missing_package() -> str | None:
    if importlib.util.find_spec("mpi4py"):
        return None
    return f'backend="mpi" needs mpi4py, which is not installed; {_CURE}'


def _missing_mpiexec() -> str | None:
    if _find_mpiexec():
        return None
    cure = "install Microsoft MPI" if sys.platform == "win32" else _CURE
    return f'backend="mpi" needs the command mpiexec, which is not installed; {cure}'


def mpiexec(world_size: int) -> list[str]:
    """Return the command line that starts `world_size` ranks; append a program and its arguments.

    It takes the mpiexec beside this Python before one on the PATH. Ranks may outnumber the cores,
    and no rank is bound to a core. Run it with `environment()` added to the environment.
    Raises BackendError where there is no mpiexec.
    """
    if world_size < 1:
        raise BackendError(f"world_size must be at least 1, got {world_size}")
    found = _find_mpiexec()
    if found is None:
        raise BackendError(_missing_mpiexec())
    flags = ["--oversubscribe", "--bind-to", "none"] if _is_open_mpi(found) else []
    return [found, *flags, "-n", str(world_size)]


def environment() -> dict[str, str]:
    """Return what to add to the environment of mpiexec, for ranks on this machine.

    Open MPI moves messages through shared memory then: no rank opens a port, and it starts a
    second faster. root must tell it besides that this is meant. What is set already is left out.
    """
    wanted = {"OMPI_MCA_btl": "self,sm", "OMPI_MCA_pml": "ob1"}
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def started_by_mpiexec() -> bool:
    """Tell whether mpiexec, or another launcher of MPI, started this process."""
    return any(names[0] in os.environ and names[1] in os.environ for names in _VARIABLES)


def place() -> tuple[int, int, int, int]:
    """Return (rank, world_size, local_rank, local_world_size) as the launcher said it.

    A launcher that says nothing of machines is taken to have started all ranks on this one.
    Raises BackendError in a process that no launcher of MPI started.
    """
    for rank, size, local_rank, local_size in _VARIABLES:
        if rank in os.environ and size in os.environ:
            there = os.environ[rank], os.environ[size]
            here = os.environ.get(local_rank), os.environ.get(local_size)
            said = there + (there if None in here else here)
            return tuple(int(value) for value in said)
    raise BackendError(
        "no launcher of MPI told this process its rank and the world size; "
        "start the ranks with mpiexec"
    )


def _find_mpiexec() -> str | None:
    # Not resolved: a Python of a virtual environment is a link to one elsewhere.
    beside = Path(sys.executable).absolute().parent
    return shutil.which("mpiexec", path=str(beside)) or shutil.which("mpiexec")


@functools.cache
def _is_open_mpi(command: str) -> bool:
    """Tell by the command's own words; the flags above are Open MPI's."""
    try:
        said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in said.stdout or "Open MPI" in said.stderr
