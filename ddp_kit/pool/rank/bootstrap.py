"""How a process becomes a rank: pipes, signals, and an end as soon as its pool has ended."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from functools import cache, partial
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import NoReturn

from ddp_kit import torch_internals
from ddp_kit.backends import mpi
from ddp_kit.pool.rank.server import RankServer
from ddp_kit.pool.rank.state import print_to_descriptors
from ddp_kit.pool.wire import messages, pickling
from ddp_kit.pool.wire.messages import CALL, RANK_MARK, KitFailed
from ddp_kit.trace import SERVING, Board

MARK_SIZE = 32  # characters of the mark that a pool answers with


def serve_spawned(control: Connection, output: Connection, board: Board, parent: int) -> None:
    """Serve the pool that has spawned this process, until its end of `control` closes.

    parent: the pool's process id.
    """
    gc.freeze()
    gc.enable()
    spawner = parent_process()
    assert spawner is not None, "spawn has started this process"
    _serve(control, output, board, parent, spawner.sentinel)
    leave(0)


def connect(path: str, rank: int) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    line.sendall(CALL.pack(rank, os.getpid()))
    return line


def serve_under_mpiexec(line: socket.socket) -> None:
    mpi.register()
    mpi.load()  # every process of an MPI job must, also one that joins no group at first
    serve_connected(line)


def serve_connected(line: socket.socket) -> None:
    """Take pipes and board from the pool at the other end of `line`, and serve it until it leaves.

    Both ends see by `line` that the other process has ended.
    """
    mark, descriptors, *_ = socket.recv_fds(line, MARK_SIZE, 3)
    if len(descriptors) < 3:
        return  # the pool has ended
    os.environ[RANK_MARK] = mark.decode()
    control, printed = (Connection(descriptor) for descriptor in descriptors[:2])
    board = Board(SimpleNamespace(detach=lambda: descriptors[2]))
    os.register_at_fork(after_in_child=line.close)  # it would hide that the rank has ended
    _serve(control, printed, board, os.getppid(), line.fileno())


def _serve(control: Connection, output: Connection, board: Board, parent: int, pool: int) -> None:
    """pool: a handle that becomes ready when the pool's process ends."""
    messages.serving = True
    try:
        # It came blocked; ignored is what this process's own children should inherit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        torch_internals.leave_resource_tracker()
        if sys.platform == "linux":
            # A spawned process would itself spawn, and a DataLoader's workers would then need a
            # dataset that can be imported. Those of a torchrun process are forked.
            multiprocessing.set_start_method("fork", force=True)
        _keep_descriptors_from_children()
        _end_with(parent, pool)
        _redirect_prints(output)
        os.register_at_fork(after_in_child=partial(_leave_rank, control, board))
        server = RankServer(control, board)
        board.write_phase(SERVING)
        server.serve()
    except Exception:
        with suppress(OSError):  # the pool has ended
            pickling.send(control, KitFailed(traceback.format_exc()))


def leave(code: int) -> NoReturn:
    """End this process with an exit code, and leave its memory to the system.

    Python would take half a second to free the objects of PyTorch one by one. As by `sys.exit`,
    threads are joined, and functions registered with atexit are called; files that a worker has
    left open stay incomplete.
    """
    torch_internals.run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be closed
            stream.flush()
    os._exit(code)


def _leave_rank(control: Connection, board: Board) -> None:
    """Keep this process, a fork of the rank, from speaking for the rank."""
    control.close()
    board.unshare()


def _end_with(parent: int, pool: int) -> None:
    """End this process as soon as `parent` or the pool ends, whatever ends them."""
    end_with_parent()
    if sys.platform == "linux":
        # Orphans of a rank's children stay below the rank, where the pool finds them.
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        connection.wait([pool])
        os._exit(1)

    threading.Thread(target=watch, name="ddp_kit watches the parent", daemon=True).start()


@cache
def end_with_parent() -> None:
    """Have the kernel end this process with its parent, and its own forks with this process.

    Only Linux can do this. It is needed because a rank stuck in native code runs no Python.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A fork, such as a DataLoader's worker, does not inherit this. The signal also comes when
    # the thread that forked ends, so only the main thread's children get it.
    by_main: list[bool] = []
    os.register_at_fork(
        before=lambda: by_main.append(threading.current_thread() is threading.main_thread()),
        after_in_parent=by_main.clear,
        after_in_child=lambda: by_main[-1] and prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def _keep_descriptors_from_children() -> None:
    """Close the pool's pipes in programs that a worker starts: they would hide that ours closed."""
    if os.path.isdir("/proc/self/fd"):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own descriptor is closed by now
                if int(name) > 2:
                    os.set_inheritable(int(name), False)


def _redirect_prints(output: Connection) -> None:
    """Point file descriptors 1 and 2 at the pool, which covers C++ and child processes too."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    print_to_descriptors()
