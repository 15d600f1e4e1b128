"""Memory that all ranks of a host share: flags, collectives and messages.

A part of lesson 21. It needs Linux, for `os.memfd_create`. A *piece* is a flat tensor of at most
ROOM bytes.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

LINE = 64  # bytes of a cache line
ROOM = 4 * 2**20  # bytes of a slot, and of a mailbox
LIMIT = 60.0  # seconds to wait for another rank


def create(nbytes: int) -> int:
    """Return a descriptor of new memory, filled with zeros, which has no name in any folder.

    Raises RuntimeError on systems other than Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("this lesson needs Linux, for os.memfd_create; on Windows, use WSL")
    descriptor = os.memfd_create("segment")
    os.ftruncate(descriptor, nbytes)
    return descriptor


def this_host() -> str:
    """Return an id of this host, which it has until it boots again."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def address(descriptor: int) -> str:
    """Return where other processes find a descriptor of this one: the host, and a path on it."""
    return f"{this_host()} /proc/{os.getpid()}/fd/{descriptor}"


def attach(where: str) -> mmap.mmap:
    """Map the memory at an `address` into this process.

    Raises RuntimeError if it is on another host or cannot be opened.
    """
    host, path = where.split(" ")
    if host != this_host():
        raise RuntimeError("shared memory needs all ranks on one host; rank 0 is on another one")
    try:
        with open(path, "r+b", buffering=0) as file:
            return mmap.mmap(file.fileno(), 0)  # 0: all of it
    except OSError as error:
        raise RuntimeError(f"cannot open the memory of rank 0: {error.strerror}") from None


def tell_all(where: str | None) -> str:
    """Return on every rank the address that rank 0 passes, with a broadcast."""
    told = [where]
    dist.broadcast_object_list(told, src=0)
    return told[0]  # type: ignore[return-value]


def spin(looks: int) -> None:
    """Look again at once."""
    pass


def give_way(looks: int) -> None:
    """Let another process use this core, if one waits for it."""
    os.sched_yield()


def nap(looks: int) -> None:
    """Sleep for 50 microseconds."""
    time.sleep(50e-6)


def give_way_then_nap(looks: int) -> None:
    """Give way at first, and sleep from the hundredth look on."""
    if looks < 100:
        os.sched_yield()
    else:
        time.sleep(50e-6)


class Flags:
    """Numbers in shared memory, one in each cache line; only one rank writes each of them.

    limit: seconds to wait for another rank. pause: what to do between two looks, a function of
    how many there have been.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        count: int,
        limit: float = LIMIT,
        pause: Callable[[int], None] = give_way_then_nap,
    ) -> None:
        self.numbers = memoryview(memory)[: count * LINE].cast("q")  # of 8 bytes each
        self.limit, self.pause = limit, pause

    def __getitem__(self, line: int) -> int:
        return self.numbers[line * LINE // 8]

    def __setitem__(self, line: int, number: int) -> None:
        self.numbers[line * LINE // 8] = number

    def wait(self, lines: Iterable[int], number: int, what: str) -> None:
        """Wait until all these lines have at least this number.

        Raises RuntimeError after the limit. what: the name of a line in that error.
        """
        looks, end = 0, time.monotonic() + self.limit
        while missing := [line for line in lines if self[line] < number]:
            looks += 1
            self.pause(looks)
            if time.monotonic() > end:
                raise RuntimeError(f"waited {self.limit:g} s for {what} {missing}")


class Segment:
    """A piece of memory that all ranks of a group have mapped.

    It has flags, a slot for each rank, and a mailbox for each pair of ranks, of ROOM bytes each.
    The system provides memory for what has been written only. `written` and `read` count the
    bytes of this rank.

    tell: returns on every rank what rank 0 passes. Other arguments are those of `Flags`.
    """

    def __init__(self, rank: int, size: int, tell: Callable = tell_all, **waiting) -> None:
        self.rank, self.size, self.turn = rank, size, 0
        self.written = self.read = 0
        lines = size + 2 * size**2  # barrier, and two for each mailbox
        start = -(-lines * LINE // 4096) * 4096
        own = create(start + (size + size**2) * ROOM) if rank == 0 else None
        memory = attach(tell(address(own) if rank == 0 else None))
        self.flags = Flags(memory, lines, **waiting)
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=start).view(-1, ROOM)
        self.slots, self.mail = whole[:size], whole[size:].view(size, size, ROOM)
        self.barrier()
        if own is not None:
            os.close(own)  # all have mapped the memory

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.turn += 1
        self.flags[self.rank] = self.turn
        self.flags.wait(range(self.size), self.turn, "ranks")


def put(segment: Segment, place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write a tensor into a part of the segment."""
    place.copy_(tensor)
    segment.written += tensor.nbytes


def get(segment: Segment, place: torch.Tensor) -> torch.Tensor:
    """Return a part of the segment, to be read once."""
    segment.read += place.nbytes
    return place


def slots_for(segment: Segment, piece: torch.Tensor) -> list[torch.Tensor]:
    """Return the beginning of every rank's slot, with the length and dtype of a piece."""
    return [slot.view(piece.dtype)[: len(piece)] for slot in segment.slots]


def all_reduce_of_two(segment: Segment, piece: torch.Tensor) -> None:
    """Sum a piece over two ranks, in place."""
    slots = slots_for(segment, piece)
    put(segment, slots[segment.rank], piece)
    segment.barrier()  # both have written
    piece += get(segment, slots[1 - segment.rank])
    segment.barrier()  # both have read


def all_reduce(segment: Segment, piece: torch.Tensor) -> None:
    """Sum a piece over all ranks, in place: rank r sums chunk r, and all others read it."""
    me, ranks = segment.rank, range(segment.size)
    chunks = piece.tensor_split(segment.size)
    shared = [slot.tensor_split(segment.size) for slot in slots_for(segment, piece)]
    others = [rank for rank in ranks if rank != me]
    for owner in others:
        put(segment, shared[me][owner], chunks[owner])
    segment.barrier()
    for rank in others:
        chunks[me].add_(get(segment, shared[rank][me]))
    put(segment, shared[me][me], chunks[me])
    segment.barrier()
    for owner in others:
        chunks[owner].copy_(get(segment, shared[owner][owner]))
    segment.barrier()


def all_reduce_bytes(n: int, nbytes: int) -> tuple[float, float]:
    """Return how many bytes a rank of n writes into the segment and reads from it."""
    return nbytes, 2 * (n - 1) / n * nbytes


def broadcast(segment: Segment, piece: torch.Tensor, root: int) -> None:
    """Copy a piece of the root to all ranks."""
    slot = slots_for(segment, piece)[root]
    if segment.rank == root:
        put(segment, slot, piece)
    segment.barrier()
    piece.copy_(get(segment, slot))
    segment.barrier()


def all_gather(segment: Segment, gathered: Sequence[torch.Tensor], piece: torch.Tensor) -> None:
    """Copy a piece of every rank into the tensors `gathered`, on all ranks."""
    slots = slots_for(segment, piece)
    put(segment, slots[segment.rank], piece)
    segment.barrier()
    for output, slot in zip(gathered, slots, strict=True):
        output.copy_(get(segment, slot))
    segment.barrier()


def mailbox(segment: Segment, src: int, dst: int, piece: torch.Tensor):
    """Return a mailbox in the form of a piece, and its flags: messages sent, messages taken."""
    line = segment.size + 2 * (src * segment.size + dst)
    if piece.nbytes > ROOM:
        raise ValueError(f"a message has at most {ROOM:,} bytes here, got {piece.nbytes:,}")
    return segment.mail[src, dst].view(piece.dtype)[: len(piece)], line, line + 1


def send(segment: Segment, piece: torch.Tensor, dst: int) -> None:
    """Put a piece into a mailbox, as soon as the message before it has been taken."""
    box, sent, taken = mailbox(segment, segment.rank, dst, piece)
    flags = segment.flags
    flags.wait([taken], flags[sent], f"rank {dst}, which has not taken a message: flag")
    put(segment, box, piece)
    flags[sent] += 1


def recv(segment: Segment, piece: torch.Tensor, src: int) -> None:
    """Take the next message of a rank out of its mailbox."""
    box, sent, taken = mailbox(segment, src, segment.rank, piece)
    flags = segment.flags
    flags.wait([sent], flags[taken] + 1, f"rank {src}, which has not sent a message: flag")
    piece.copy_(get(segment, box))
    flags[taken] += 1
