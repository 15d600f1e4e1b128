"""The program that mpiexec starts for a pool: it connects to the pool and becomes a rank.

It runs as a script. Its arguments are the pool's socket and, as JSON, `sys.path` and `sys.argv` of
the pool's process and the format of `CALL`, which it cannot import yet. mpiexec passes no pipes on,
so the pool sends them over the connection. Large imports happen meanwhile.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules must not be found by their short names

import json
import os
import socket
import struct

NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def main() -> None:
    """Connect to the pool and serve it. Both ends see by the connection that the other ended."""
    rank = next(os.environ[name] for name in NAMES if name in os.environ)
    line = socket.socket(socket.AF_UNIX)
    line.connect(sys.argv[1])
    sys.path[:], sys.argv[:], call = json.loads(sys.argv[2])
    line.sendall(struct.pack(call, 0, int(rank), os.getpid()))

    from ddp_kit.backends import mpi
    from ddp_kit.pool.rank.bootstrap import serve_connected

    mpi.register()
    mpi.load()  # every process of an MPI job must, also one that joins no group at first
    serve_connected(line)


if __name__ == "__main__":
    main()
