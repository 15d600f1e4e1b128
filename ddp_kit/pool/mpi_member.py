"""What a process does that mpiexec has started for a pool: it calls the pool, and becomes a rank.

Run as a script; its arguments are the pool's socket, and the `sys.path` and `sys.argv` of the
pool's process. mpiexec hands no pipes down, so the pool sends them in answer to the call. What is
large is imported meanwhile.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not meant to be found by name

import json
import os
import socket
import struct

CALL = struct.Struct("=QQQ")  # which start of the program this is, rank, process id
NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def main() -> None:
    """Call the pool and serve it. The connection stays: its end tells each that the other ended."""
    rank = next(os.environ[name] for name in NAMES if name in os.environ)
    line = socket.socket(socket.AF_UNIX)
    line.connect(sys.argv[1])
    line.sendall(CALL.pack(0, int(rank), os.getpid()))
    sys.path[:], sys.argv[:] = json.loads(sys.argv[2])

    from ddp_kit import mpi
    from ddp_kit.pool.member import serve

    mpi.register()
    mpi.load()  # all processes of a job must do so, also those that are in no group at first
    serve(line)


if __name__ == "__main__":
    main()
