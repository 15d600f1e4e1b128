"""What a backend in shared memory needs besides what the lesson shows, and its proof."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ddp_kit import compare
from ddp_kit.lessons._launch import Ranks, lesson_main, prove


def this_host() -> str:
    """Return an id of this host, which it has until it boots again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def tell_by_store(store, where):
    """Return on every rank the address that rank 0 passes, through the store of a group."""
    if where is not None:
        store.set("segment", where)
    return store.get("segment").decode()


def without_store(store, rank, size, timeout):
    """Return a group whose ranks have no store in common, as under mpiexec."""
    told = [None]
    by_broadcast = SimpleNamespace(
        set=lambda key, where: told.append(where),
        get=lambda key: lesson.tell_all(told[-1]).encode(),
    )
    return lesson.SegmentGroup(by_broadcast, rank, size, timeout)


class Receive(dist.Work):
    """The `Work` of a receive, which takes its message when somebody waits for it."""

    def __init__(self, take):
        super().__init__()
        self.take = take

    def wait(self, timeout=None):
        take, self.take = self.take, None
        if take is not None:
            take()
        return True

    def is_completed(self):
        return self.take is None


def broadcast(segment, piece, root):
    """Copy a piece of the root to all ranks."""
    slot = lesson.slots_for(segment, piece)[root]
    if segment.rank == root:
        lesson.put(segment, slot, piece)
    segment.barrier()
    piece.copy_(lesson.get(segment, slot))
    segment.barrier()


def all_gather(segment, gathered, piece):
    """Copy a piece of every rank into the tensors `gathered`, on all ranks."""
    slots = lesson.slots_for(segment, piece)
    lesson.put(segment, slots[segment.rank], piece)
    segment.barrier()
    for output, slot in zip(gathered, slots, strict=True):
        output.copy_(lesson.get(segment, slot))
    segment.barrier()


def timed(call, *args):
    """Return the seconds that a call takes after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def slowest(result):
    """Return for each name pairs of bytes and the seconds of each round of the slowest rank."""
    return {
        name: [
            (nbytes, list(map(max, zip(*(rank[name][nbytes] for rank in result), strict=True))))
            for nbytes in points
        ]
        for name, points in result[0].items()
    }


def one_step(network, x):
    """Compute gradients, which DDP averages."""
    network(x).square().mean().backward()


def join_anywhere():
    """Return the lesson's group under any launcher."""
    return lesson.join(without_store if "mpi" in dist.get_backend() else lesson.SegmentGroup)


@lesson_main("your_own_backend")
def main(ranks: Ranks) -> str:
    """Compare sums and a training with the ranks' own backend, and print one line."""
    n, count = ranks.world_size, 1000
    whole = sum(lesson.numbers(rank, count) for rank in range(n))
    sums = [found for found, _ in ranks(lesson.reduce_in, lesson.all_reduce, count)]
    prove("all_reduce is exact", all(torch.equal(each, whole) for each in sums))
    ours, theirs = (list(ranks(lesson.train, own, 5, join_anywhere)) for own in (True, False))
    prove("DDP trains as over the other backend", compare(ours, theirs))
    return "sums are exact and DDP trains as over gloo"


from ddp_kit.lessons import your_own_backend as lesson
