"""What a process does that mpiexec has started for a pool: it calls the pool, and becomes a rank.

Run as a script, with the pool's socket as argument. mpiexec hands no pipes down; the pool sends
them in answer to the call. Nothing large is imported before, because the pool waits for the call.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not meant to be found by name

import os
import pickle
import socket
import struct
from types import SimpleNamespace

CALL = struct.Struct("=QQ")  # rank, process id
SIZE = struct.Struct("=Q")  # of the answer, which is pickled


def main() -> None:
    """Call the pool and serve it. The connection stays: its end tells each that the other ended."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(sys.argv[1])
    rank = next(os.environ[n] for n in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"))
    line.sendall(CALL.pack(int(rank), os.getpid()))
    head, descriptors, *_ = socket.recv_fds(line, SIZE.size, 3)
    with line.makefile("rb") as answer:
        sys.path[:], mark = pickle.loads(answer.read(*SIZE.unpack(head)))
    sys.argv[:] = ["-c"]

    from multiprocessing.connection import Connection

    from ddp_kit import mpi
    from ddp_kit.pool import worker
    from ddp_kit.pool.children import MARK
    from ddp_kit.trace import Board

    os.environ[MARK] = mark
    control, printed = (Connection(descriptor) for descriptor in descriptors[:2])
    board = Board(SimpleNamespace(detach=lambda: descriptors[2]))
    mpi.load()  # all processes of a job must do so, also those that are in no group at first
    worker.main(0, control, printed, board, os.getppid(), line.fileno())


if __name__ == "__main__":
    main()
