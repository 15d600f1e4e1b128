"""All findings, and the page they make."""

from __future__ import annotations

import textwrap
import warnings

from ddp_kit.doctor import machine, software
from ddp_kit.doctor.finding import Finding, ask, attempt

WIDTH = 100  # columns; a notebook shows that many without wrapping

CHECKS = {
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


def findings() -> list[Finding]:
    """Return what every check found, in the order of the page."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings say it, and stderr stays empty
        found = [ask(subject, check) for subject, check in CHECKS.items()]
    # Asked here: in a thread of its own this check would always find that thread.
    return [*found, attempt("main thread", software.main_thread)]


def report(found: list[Finding]) -> str:
    """Return the findings as aligned lines, and how many want a look."""
    return "\n".join([*map(_line, found), "", _summary(found)])


def _line(finding: Finding) -> str:
    start = f"{'ok' if finding.ok else 'LOOK':<6}{finding.subject:<18}"
    return textwrap.fill(
        f"{finding.found}. {finding.consequence}",
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(found: list[Finding]) -> str:
    look = sum(not finding.ok for finding in found)
    if not look:
        return "Nothing here stands in the way."
    return f"{look} {'line wants' if look == 1 else 'lines want'} a look."
