"""Processes that multiprocessing spawns are forked from one that has imported PyTorch.

An import takes 1.5 s of CPU time, and a notebook starts up to 20 ranks. Here they take one import
together. nbval runs the notebooks so, with the scripts that they start; that ranks can be spawned
is tested in tests/faults, tests/notebooks/test_scripts.py and tests/browser.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from multiprocessing import forkserver, process, resource_tracker, spawn

# Imported before the first fork, if the process that spawns has imported them; the variable has
# the names of more, separated by commas.
PRELOAD = ("torch", "torch.distributed.tensor", "torchvision", "ddp_kit.pool.rank.bootstrap")
# The defaults of its functions keep the default group of the moment in which it is imported. Such a
# group's threads run until the process ends; one that drops its last tensor then aborts it
# ("terminate called without an active exception").
KEEPS_GROUP = "torch.distributed.nn.functional"
at_start = set(os.environ)
get_preparation_data, prepare = spawn.get_preparation_data, spawn.prepare


def install() -> None:
    multiprocessing.get_context("spawn").Process._Popen = staticmethod(_fork)
    spawn.get_preparation_data, spawn.prepare = _get_preparation_data, _prepare


def _fork(own: process.BaseProcess) -> object:
    from multiprocessing.popen_forkserver import Popen

    # Else a tracker starts, which the kit keeps from its ranks.
    track, resource_tracker.ensure_running = resource_tracker.ensure_running, lambda: None
    try:
        _ensure_server()
        return Popen(own)
    finally:
        resource_tracker.ensure_running = track


def _ensure_server() -> None:
    """Start the server, without the variables that this process has got since its start.

    The mark of a rank is among them: the server would be ended with that rank.
    """
    new = {name: os.environ.pop(name) for name in os.environ.keys() - at_start}
    try:
        preload = [name for name in PRELOAD if name in sys.modules]
        more = filter(None, os.environ["DDP_KIT_FORKED_SPAWN"].split(","))
        # A script of a notebook, which has not imported the kit, does without its lessons.
        preload += [name for name in more if name.partition(".")[0] in sys.modules]
        if "torch" in preload:  # a first optimizer's step imports it, see below
            preload.append(KEEPS_GROUP)
        forkserver.set_forkserver_preload(preload)
        forkserver.ensure_running()
    finally:
        os.environ.update(new)


def _get_preparation_data(name: str) -> dict:
    return get_preparation_data(name) | {"variables": dict(os.environ), "parent": os.getpid()}


def _prepare(data: dict) -> None:
    """Give a fork the variables and the parent that it would have if it were spawned."""
    if "variables" in data:
        gc.freeze()  # what was imported stays
        for name in os.environ.keys() - data["variables"].keys():
            del os.environ[name]
        os.environ.update(data["variables"])
        os.getppid = lambda: data["parent"]
    prepare(data)
