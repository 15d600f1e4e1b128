"""Checks of this machine: what works on it, and what may go wrong."""

from __future__ import annotations

import textwrap
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["doctor"]

TIMEOUT = 5.0  # seconds; a driver or a network folder that hangs may take no longer
WIDTH = 100  # columns; a notebook shows that many without wrapping


@dataclass(frozen=True)
class Finding:
    """What one check found, and what follows from it."""

    found: str
    consequence: str  # what it means, and what to do if it is a problem
    ok: bool = True  # False if it needs the learner's attention


def doctor() -> None:
    """Print what works on this machine and what may go wrong: one line per check, and a summary."""
    print(format_report(findings()))


def findings() -> dict[str, Finding]:
    """Return what every check found, by its subject, in the order of the report."""
    from ddp_kit.doctor import checks  # a rank has no use for them

    by_subject = {
        "Python": checks.python,
        "PyTorch": checks.pytorch,
        "torchvision": checks.torchvision,
        "backends": checks.backends,
        "GPUs": checks.gpus,
        "CUDA": checks.cuda,
        "cores": checks.cores,
        "memory": checks.memory,
        "shared memory": checks.shared_memory,
        "loopback": checks.loopback,
        "open files": checks.open_files,
        "temporary folder": checks.temporary_folder,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings report it, and stderr stays empty
        found = {subject: run_check(check) for subject, check in by_subject.items()}
    # In this thread: one of its own would never be the main thread.
    return found | {"main thread": guard(checks.main_thread)}


def run_check(check: Callable[[], Finding], timeout: float = TIMEOUT) -> Finding:
    """Return what a check finds, or that it raised an error or took longer than `timeout`."""
    results: list[Finding] = []
    # Some checks call into the system, where only another thread can stop waiting for them.
    thread = threading.Thread(
        target=lambda: results.append(guard(check)), name="ddp_kit doctor", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:
        return _failed(str(error))
    thread.join(timeout)
    return results[0] if results else _failed(f"no result within {timeout:g} s")


def guard(check: Callable[[], Finding]) -> Finding:
    """Return what a check finds in this thread, or that it raised an error."""
    try:
        return check()
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error}".rstrip(": "))


def _failed(reason: str) -> Finding:
    return Finding(f"the check failed ({reason})", "The kit may work nevertheless.", ok=False)


def format_report(found: Mapping[str, Finding]) -> str:
    """Return the findings as aligned lines, and how many need attention."""
    problems = sum(not finding.ok for finding in found.values())
    summary = f"{problems} {'line needs' if problems == 1 else 'lines need'} attention."
    lines = [_format_finding(subject, finding) for subject, finding in found.items()]
    return "\n".join([*lines, "", summary if problems else "No problems found."])


def _format_finding(subject: str, finding: Finding) -> str:
    start = f"{'ok' if finding.ok else 'WARN':<6}{subject:<18}"
    return textwrap.fill(
        f"{finding.found}. {finding.consequence}",
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
