"""Checks of this machine: what works on it, and what may go wrong."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_kit.doctor.report import Finding

__all__ = ["doctor"]


def doctor() -> None:
    """Print what works on this machine and what may go wrong: one line per check, and a summary."""
    from ddp_kit.doctor.report import format_report

    print(format_report(findings()))


def findings() -> list[Finding]:
    """Return what every check found, in the order of the report."""
    from ddp_kit.doctor import machine, software  # a rank has no use for them
    from ddp_kit.doctor.report import guard, run_check

    checks = {
        "Python": software.python,
        "PyTorch": software.pytorch,
        "torchvision": software.torchvision,
        "backends": software.backends,
        "GPUs": machine.gpus,
        "CUDA": software.cuda,
        "cores": machine.cores,
        "memory": machine.memory,
        "shared memory": machine.shared_memory,
        "loopback": machine.loopback,
        "open files": machine.open_files,
        "temporary folder": machine.temporary_folder,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings report it, and stderr stays empty
        found = [run_check(subject, check) for subject, check in checks.items()]
    # In this thread: one of its own would never be the main thread.
    return [*found, guard("main thread", software.main_thread)]
