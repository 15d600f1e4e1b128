"""The proof of the lesson on device meshes, and the bytes that TCP sent."""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import stat
import struct
import sys
from collections import Counter
from contextlib import suppress

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from ddp_kit import compare
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.trace import Trace

# Once in each process, PyTorch warns that it gathers on the CPU where it could call all_to_all, and
# that it gathers along two dimensions of a mesh one after the other.
for name in ("_collective_utils", "_redistribute"):
    logging.getLogger(f"torch.distributed.tensor.{name}").setLevel(logging.ERROR)

# Every change that `redistribute` makes: nothing becomes partial.
CHANGES = [
    (before, after)
    for before, after in itertools.product((Shard(0), Shard(1), Replicate(), Partial()), repeat=2)
    if before != after and after != Partial()
]


def collectives(trace: Trace) -> list[str]:
    """Return what rank 0 called, in order, but not the new_group of a mesh."""
    return [event.op for event in trace if event.rank == 0 and event.op != "new_group"]


def sent_by_tcp() -> Counter[int]:
    """Return how many bytes this process has sent so far, by connection.

    A difference of two counts has what was sent in between, without connections that were closed
    meanwhile, such as those of an earlier group. Only Linux counts; elsewhere the result is empty.
    """
    sent: Counter[int] = Counter()
    for number in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # it was closed, or is no connection
            status = os.stat(int(number))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= 216:  # a kernel before 4.19 says less
                    # A busy machine sends some bytes again, which says nothing about the program.
                    sent_in_all, sent_again = struct.unpack_from("QQ", info, 200)
                    sent[status.st_ino] = sent_in_all - sent_again
    return sent


@lesson_main("device_mesh")
def main(ranks: Ranks) -> str:
    """Compare both ways with each other, and meshes with groups, and print one line."""
    for before, after in CHANGES:
        workers = lesson.by_hand, lesson.by_dtensor
        by_hand, by_dtensor = (list(ranks(worker, before, after, 5, 3)) for worker in workers)
        prove(f"{before!r} to {after!r} is as DTensor's", compare(by_hand, by_dtensor))
    for _, members, same in ranks(lesson.who_am_i, math.gcd(ranks.world_size, 2)):
        prove("a mesh has the groups made by hand", members == same)
    return f"{len(CHANGES)} changes of placement by hand equal DTensor's, and so do meshes"


from ddp_kit.lessons import device_mesh as lesson
