"""How a process becomes a rank that the pool has not spawned itself."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from types import SimpleNamespace

from ddp_kit.pool import worker
from ddp_kit.pool.children import MARK
from ddp_kit.trace import Board

MARK_SIZE = 32  # characters of the answer, which says how the rank's children are marked


def serve(line: socket.socket) -> None:
    """Take pipes and board from the pool that was called, and serve it until it lets go.

    The end of `line` tells each that the other has ended.
    """
    mark, descriptors, *_ = socket.recv_fds(line, MARK_SIZE, 3)
    if len(descriptors) < 3:
        return  # the pool is gone
    os.environ[MARK] = mark.decode()
    control, printed = (Connection(descriptor) for descriptor in descriptors[:2])
    board = Board(SimpleNamespace(detach=lambda: descriptors[2]))
    worker.main(0, control, printed, board, os.getppid(), line.fileno())
