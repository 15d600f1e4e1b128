"""Waiting for processes, bounded: each function fails loudly instead of waiting forever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

BOUND = 60.0  # seconds that an interrupt or an end may take; far more than they need


def alive(process: psutil.Process) -> bool:
    """Return whether it is running. A zombie is not: its parent may be gone, or slow to reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(processes: Iterable[psutil.Process], seconds: float = BOUND) -> bool:
    """Wait until all have ended; return whether they have."""
    processes = list(processes)
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < deadline:
        psutil.wait_procs(processes, timeout=0.05)
    return not any(map(alive, processes))


def assert_gone(processes: list[psutil.Process], after: str) -> None:
    assert processes
    gone = ended(processes)
    left = [process for process in processes if alive(process)]
    for process in left:
        process.kill()  # an orphan is no longer our descendant, so no fixture would see it
    assert gone, f"left alive after {after}: {left}"


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def wait_until_calm(ranks: list[psutil.Process]) -> None:
    """Return once the ranks have slept for a while: they are blocked in native code.

    On a busy machine a rank may use no CPU time although it could run.
    """
    calm, before = 0, None

    def settled() -> bool:
        nonlocal calm, before
        asleep = all(rank.status() == psutil.STATUS_SLEEPING for rank in ranks)
        now = [sum(rank.cpu_times()[:2]) for rank in ranks]
        calm, before = (calm + 1 if asleep and now == before else 0), now
        return calm == 15

    wait_until(settled, BOUND, "the ranks are blocked")
