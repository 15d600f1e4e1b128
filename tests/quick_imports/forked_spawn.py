"""Processes that multiprocessing spawns are forked from one that has imported PyTorch, the server.

An import takes 1.5 s of CPU time, and a notebook starts up to 20 ranks. Here they take one import
together with the kernel or script that starts them: it imports PyTorch first of all, and forks the
server before it starts threads of its own. nbval runs the notebooks so, with the scripts that they
start. That ranks can be spawned is tested in tests/faults, tests/notebooks/test_scripts.py and
tests/browser, and tests/notebooks/regenerate.py executes all notebooks without any fork.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from multiprocessing import forkserver, process, resource_tracker, spawn, util
from pathlib import Path

# Imported before the first fork, if the process that spawns has imported them; the variable has
# the names of more, separated by commas.
PRELOAD = ("torch", "torch.distributed.tensor", "torchvision", "ddp_kit.pool.rank.bootstrap")
# The defaults of its functions keep the default group of the moment in which it is imported. Such a
# group's threads run until the process ends; one that drops its last tensor then aborts it
# ("terminate called without an active exception").
KEEPS_GROUP = "torch.distributed.nn.functional"
at_start = set(os.environ)
get_preparation_data, prepare = spawn.get_preparation_data, spawn.prepare
spawnv_passfds = util.spawnv_passfds
forked: tuple[int, socket.socket] | None = None  # the server that waits for its first rank


def install() -> None:
    multiprocessing.get_context("spawn").Process._Popen = staticmethod(_fork)
    spawn.get_preparation_data, spawn.prepare = _get_preparation_data, _prepare
    if _spawns_ranks(sys.orig_argv[1:]):
        _fork_server()


def _spawns_ranks(command: list[str]) -> bool:
    """Return whether a command is a kernel or a script that calls `mp.spawn`."""
    if command[:2] == ["-m", "ipykernel_launcher"]:
        return True
    with suppress(OSError, IndexError, ValueError):
        return command[0].endswith(".py") and "mp.spawn(" in Path(command[0]).read_text("utf-8")
    return False


def _fork_server() -> None:
    """Fork a process that becomes the server when it is told how, and ends with this one."""
    global forked
    for name in ("torch", *os.environ["DDP_KIT_FORKED_SPAWN"].split(",")):
        if name.startswith("torch"):  # the kit is left to the notebook
            with suppress(ImportError):
                importlib.import_module(name)
    mine, its = socket.socketpair()
    pid = os.fork()
    if pid:
        its.close()
        forked = pid, mine
        return
    status = 1
    try:
        mine.close()
        _wait_for_command(its)
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait_for_command(connection: socket.socket) -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with connection:
        command, files, _, _ = socket.recv_fds(connection, 1 << 20, 8)
    signal.signal(signal.SIGINT, handler)
    if not command:  # the kernel or script has ended
        return
    numbers, _, code = command.decode().partition(" ")
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in files]
    for file, number in zip(apart, numbers.split(","), strict=True):
        os.dup2(file, int(number))
        os.close(file)
    exec(code, {})


def _become_server(executable: str, command: list[str], files: list[int]) -> int:
    """Have the forked process run the code that a new Python would run; return its pid."""
    global forked
    if forked is None:
        return spawnv_passfds(executable, command, files)
    pid, connection = forked
    forked = None
    text = f"{','.join(map(str, files))} {command[-1]}"
    with connection:
        socket.send_fds(connection, [text.encode()], files)
    return pid


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
        util.spawnv_passfds = _become_server
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawnv_passfds
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
