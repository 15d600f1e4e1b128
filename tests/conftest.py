"""Every test proves that it leaves no process behind."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker

import forked_ranks as forked
import psutil
import pytest
from forked_ranks import forked_ranks  # noqa: F401 - a fixture
from kernels import forked_spawn, forked_torchrun, kernel, shared  # noqa: F401 - fixtures
from processes import BOUND, alive

import ddp_kit as kit
from ddp_kit import settings
from ddp_kit.pool import live_view
from ddp_kit.pool import pool as pool_module

settings.LONGEST_FAILURE_GRACE = 5.0  # see quick_imports/sitecustomize.py


def pytest_sessionstart() -> None:
    """Let SIGINT raise KeyboardInterrupt, as it does for programs started in a terminal.

    A script's background job (`pytest &`, nohup) starts with SIGINT ignored, and so would every
    process that a test starts: tests of interrupts would wait for something that never comes. A
    handler, unlike SIG_IGN, is not inherited across exec, so those processes get the default.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def shared_pools() -> list[kit.WorkerPool]:
    return [*pool_module._shared.values(), *forked.shared_pools.values()]


def children() -> list[psutil.Process]:
    """Return living descendants, except the shared pools' ranks and multiprocessing's helpers."""
    known = {resource_tracker._resource_tracker._pid, forked.server()}
    for pool in shared_pools():
        known |= {rank.process.pid for rank in pool._processes.ranks}
        known |= {rank.process.launcher for rank in pool._processes.ranks if pool._backend == "mpi"}
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in known and alive(child)
    ]


@pytest.fixture(autouse=True)
def no_process_survives():
    """Fail a test that leaves a process alive, and end that process."""
    before = set(children())
    yield
    _, left = psutil.wait_procs([c for c in children() if c not in before], timeout=BOUND)
    for process in left:
        process.kill()
    assert not left, f"left alive: {left}"


@pytest.fixture(scope="session", autouse=True)
def end_of_session():
    yield
    for pool in shared_pools():
        pool.close()


@pytest.fixture
def pool():
    """A pool of its own for a test that breaks it."""
    with kit.WorkerPool(2) as own:
        yield own


@pytest.fixture
def watch(monkeypatch):
    """Return a function that has `look` called with the lines of the live view of each run."""

    def watch(look):
        class Watching(live_view.LiveView):
            def update(self, lines):
                look(lines)

        monkeypatch.setattr(live_view, "current", live_view.View(Watching))

    return watch
