"""One thing that was found out, and how to ask for it without being held up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE = 5.0  # seconds; a driver or a network folder that hangs may take no longer


@dataclass(frozen=True)
class Finding:
    """What one check found, and what follows from it."""

    subject: str
    found: str
    consequence: str  # one sentence or two
    ok: bool  # False if the learner should look at it


def ask(subject: str, check: Callable[[], Finding], seconds: float = PATIENCE) -> Finding:
    """Return what the check finds; if it raises or hangs, say that instead."""
    answers: list[Finding] = []

    def answer() -> None:
        answers.append(attempt(subject, check))

    # Some checks end in the system, where nothing but another thread can stop waiting for them.
    thread = threading.Thread(target=answer, name=f"ddp_kit looks at {subject}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        return _unknown(subject, str(error))
    thread.join(seconds)
    return answers[0] if answers else _unknown(subject, f"no answer within {seconds:g} s")


def attempt(subject: str, check: Callable[[], Finding]) -> Finding:
    """Return what the check finds, in this thread; if it raises, say that instead."""
    try:
        return check()
    except Exception as error:
        return _unknown(subject, f"{type(error).__name__}: {error}".rstrip(": "))


def _unknown(subject: str, reason: str) -> Finding:
    return Finding(
        subject, f"could not be found out ({reason})", "The kit may work all the same.", ok=False
    )
