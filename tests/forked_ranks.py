"""Ranks that are forked from a process that has imported PyTorch, which takes milliseconds.

A spawned rank imports it for 1.5 s of CPU time, and every run that ends in a deadlock costs two
ranks. Tests that are about what ranks call or report, and not about their processes, use these:

    pytestmark = pytest.mark.usefixtures("forked_ranks")

Everything else is as in any pool: the pipes, the signals, the group on gloo, the end of a rank.
Only on Linux is a fork of PyTorch safe; elsewhere, and in `make spawned`, the fixture does nothing.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os

import pytest
from kernels import FORKS

from ddp_kit.pool import launchers
from ddp_kit.pool import pool as pool_module
from ddp_kit.pool.wire.messages import RANK_MARK

# Imported before the fork; DistributedDataParallel imports torch._dynamo, which takes a second.
IMPORTED = ["ddp_kit.pool.rank.bootstrap", "torch._dynamo"]

shared_pools: dict[str, pool_module.WorkerPool] = {}  # of forked ranks, for all files of a session


@pytest.fixture
def forked_ranks():
    """Fork the ranks of all pools, and let `kit.run` use a pool of such ranks."""
    if not FORKS:
        yield
        return
    multiprocessing.set_forkserver_preload(IMPORTED)
    # Now, because later it would get the mark of a rank, and be killed with that.
    multiprocessing.forkserver.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "NewProcess", _new_process)
        patch.setattr(pool_module, "_shared", shared_pools)
        yield


def server() -> int | None:
    """Return the process that forks the ranks, if there is one."""
    return multiprocessing.forkserver._forkserver._forkserver_pid


def _new_process(target, args):
    args = target, os.environ[RANK_MARK], args[:-1]
    return multiprocessing.get_context("forkserver").Process(target=_serve, args=args)


def _serve(serve, mark, args):
    os.environ[RANK_MARK] = mark
    serve(*args, os.getppid())  # the rank ends with the process that has forked it
