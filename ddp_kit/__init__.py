"""ddp_kit: learn PyTorch distributed in a notebook, on real processes.

import ddp_kit as kit

result = kit.run(worker, world_size=4)   # worker(rank, world_size) on four processes
result[2], result.output[2]              # what rank 2 returned and printed
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddp_kit.backends import device
from ddp_kit.comparison import Comparison, compare
from ddp_kit.data import mnist
from ddp_kit.doctor_checks import doctor
from ddp_kit.error_text import RankFailure
from ddp_kit.errors import (
    BackendError,
    CompareError,
    CourseError,
    DataError,
    DeadlockError,
    ExerciseError,
    InternalError,
    KitError,
    MismatchError,
    ModelError,
    PlotError,
    PoolError,
    ProofError,
    RankDiedError,
    RankError,
    ResultError,
    RunTimeoutError,
    TraceError,
)
from ddp_kit.pool import Result, WorkerPool, run, shutdown, status
from ddp_kit.pool.ipython import shell
from ddp_kit.pool.torchrun import torchrun
from ddp_kit.trace import load_trace, progress

if TYPE_CHECKING:
    from ddp_kit import check, lessons, model, plot
    from ddp_kit.notebook.prediction import predict

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CompareError",
    "Comparison",
    "CourseError",
    "DataError",
    "DeadlockError",
    "ExerciseError",
    "InternalError",
    "KitError",
    "MismatchError",
    "ModelError",
    "PlotError",
    "PoolError",
    "ProofError",
    "RankDiedError",
    "RankError",
    "RankFailure",
    "Result",
    "ResultError",
    "RunTimeoutError",
    "TraceError",
    "WorkerPool",
    "check",
    "compare",
    "device",
    "doctor",
    "lessons",
    "load_trace",
    "mnist",
    "model",
    "plot",
    "predict",
    "progress",
    "run",
    "shutdown",
    "status",
    "torchrun",
]

# A rank has no use for them, and matplotlib takes its time.
_LAZY = {"check", "lessons", "model", "plot"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"ddp_kit.{name}")
    if name == "predict":
        from ddp_kit.notebook.prediction import predict

        return predict
    raise AttributeError(f"module 'ddp_kit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def load_ipython_extension(ipython: Any) -> None:
    """Give a notebook `%%ranks` and `%ranks`; `%load_ext ddp_kit` calls this."""
    from ddp_kit.notebook import magics

    magics.load(ipython)


if shell() is not None:
    from ddp_kit.notebook import live

    live.take_over()
