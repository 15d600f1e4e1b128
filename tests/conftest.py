"""Every test proves that it leaves no process behind."""

from __future__ import annotations

from multiprocessing import resource_tracker

import psutil
import pytest

import ddp_kit as kit
from ddp_kit.pool import pool as pool_module


def children() -> list[psutil.Process]:
    """Living descendants, but for the shared pool's ranks and multiprocessing's own helper."""
    shared = pool_module._shared
    known = {resource_tracker._resource_tracker._pid}
    if shared is not None:
        known |= {rank.process.pid for rank in shared._ranks}
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in known and child.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture(autouse=True)
def no_process_survives():
    """Fail a test that leaves a process alive, and end that process."""
    before = set(children())
    yield
    _, alive = psutil.wait_procs([c for c in children() if c not in before], timeout=3)
    for process in alive:
        process.kill()
    assert not alive, f"left alive: {alive}"


@pytest.fixture(scope="session", autouse=True)
def end_of_session():
    yield
    if pool_module._shared is not None:
        pool_module._shared.close()


@pytest.fixture
def pool():
    """A pool of a test's own, for tests that break it."""
    with kit.WorkerPool(2) as own:
        yield own
