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
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

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


def sum_of_parts(n: int) -> float:
    """Return how many times the matrix the parts of `own_part` add up to if it is partial."""
    return sum(10.0**rank for rank in range(n))


@lesson_main("device_mesh")
def main(ranks: Ranks) -> str:
    """Compare both ways with each other and with one process, and print one line."""
    n = ranks.world_size
    for shape in ((5, 3), (n, 2 * n)):
        for before, after in CHANGES:
            _prove_change(ranks, before, after, shape)
    rows = math.gcd(n, 2)
    for _, members, same in ranks(lesson.who_am_i, rows):
        prove("a mesh has the groups made by hand", members == same)
    return f"{len(CHANGES)} changes of placement by hand equal DTensor's, and so do meshes"


def _prove_change(ranks, before: Placement, after: Placement, shape: tuple[int, int]) -> None:
    """Prove that both ways of a change are right, and send what the formula says."""
    n = ranks.world_size
    total = sum_of_parts(n) if before == Partial() else 1
    expected = [total * lesson.own_part(rank, n, after, *shape) for rank in range(n)]
    for worker in (lesson.by_hand, lesson.by_dtensor):
        by_hand = worker is lesson.by_hand
        claim = f"{before!r} to {after!r} {worker.__name__} of {shape}"
        result = ranks(worker, before, after, *shape)
        prove(claim, compare([held["after"] for held in result], expected))
        uneven = any(length % n for length in shape)  # some ranks send more than others
        if uneven or any(event.device != "cpu" for event in result.trace):
            continue  # on GPUs, DTensor calls other collectives
        for rank in range(n):
            nbytes = sum(row.sent for row in result.trace.summary(rank=rank).rows)
            formula = round(lesson.bytes_sent(before, after, shape, n, all_to_all=by_hand))
            prove(f"{claim} sends {formula} bytes", nbytes == formula)


from ddp_kit.lessons import device_mesh as lesson
