"""A finding, how a check is run without being held up by it, and the report of all findings."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass

TIMEOUT = 5.0  # seconds; a driver or a network folder that hangs may take no longer
WIDTH = 100  # columns; a notebook shows that many without wrapping


@dataclass(frozen=True)
class Finding:
    """What one check found, and what follows from it."""

    subject: str
    found: str
    consequence: str  # what it means, and what to do if it is a problem
    ok: bool = True  # False if it needs the learner's attention


def run_check(subject: str, check: Callable[[], Finding], timeout: float = TIMEOUT) -> Finding:
    """Return what a check finds, or that it raised an error or took longer than `timeout`."""
    results: list[Finding] = []
    # Some checks call into the system, where only another thread can stop waiting for them.
    thread = threading.Thread(
        target=lambda: results.append(guard(subject, check)),
        name=f"ddp_kit checks {subject}",
        daemon=True,
    )
    try:
        thread.start()
    except RuntimeError as error:
        return _failed(subject, str(error))
    thread.join(timeout)
    return results[0] if results else _failed(subject, f"no result within {timeout:g} s")


def guard(subject: str, check: Callable[[], Finding]) -> Finding:
    """Return what a check finds in this thread, or that it raised an error."""
    try:
        return check()
    except Exception as error:
        return _failed(subject, f"{type(error).__name__}: {error}".rstrip(": "))


def _failed(subject: str, reason: str) -> Finding:
    return Finding(
        subject, f"the check failed ({reason})", "The kit may work nevertheless.", ok=False
    )


def format_report(found: list[Finding]) -> str:
    """Return the findings as aligned lines, and how many need attention."""
    return "\n".join([*map(_format_finding, found), "", _format_summary(found)])


def _format_finding(finding: Finding) -> str:
    start = f"{'ok' if finding.ok else 'WARN':<6}{finding.subject:<18}"
    return textwrap.fill(
        f"{finding.found}. {finding.consequence}",
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _format_summary(found: list[Finding]) -> str:
    problems = sum(not finding.ok for finding in found)
    if not problems:
        return "No problems found."
    return f"{problems} {'line needs' if problems == 1 else 'lines need'} attention."
