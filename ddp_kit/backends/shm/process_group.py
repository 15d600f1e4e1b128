"""The process group of `shm`: how its operations start, and how its ranks come to share a segment.

They meet through PyTorch's store. Each rank writes into it on which host it runs. Rank 0 waits for
all, creates the segment, and writes where it is: a descriptor of its own process, which the others
open under /proc. When all have opened it, rank 0 closes the descriptor.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from ddp_kit.backends.process_group import Call, PythonProcessGroup, timeout_error
from ddp_kit.backends.shm import segment as segments
from ddp_kit.backends.shm.collectives import SharedMemoryCollectives
from ddp_kit.backends.shm.engine import Engine, SharedWork, Steps
from ddp_kit.backends.shm.messages import Inboxes, Outbox
from ddp_kit.backends.shm.segment import PID, Segment
from ddp_kit.errors import BackendError


class SharedMemoryProcessGroup(PythonProcessGroup):
    """A process group whose ranks share memory, on one host.

    Every operation begins in the caller's thread. `Work.wait` moves it on and sleeps while it
    cannot go on; a thread of the group does the same for operations that nobody waits for.
    Collectives of a group run one after another, in the order of the program.

    `send` ends when the message was received, as with gloo. A message that is larger or smaller
    than the receiver's tensor raises an error there. Ranks whose collectives differ in kind, dtype
    or size get an error that names both, unless one of the two is a gather, scatter or all_to_all:
    then they wait for each other.

    After its timeout an operation raises RuntimeError, and also as soon as a process has ended
    without which it cannot go on. After a collective that failed the group cannot be used again.

    `collectives.combine` says in which order sums are added, and `segment` what the order of stores
    relies on. The README has a table of what this backend lacks.

    members: pidfds of the other processes, by rank. timeout: seconds until an operation fails.
    """

    def __init__(self, segment: Segment, members: dict[int, int], timeout: float) -> None:
        collectives = SharedMemoryCollectives(segment)
        super().__init__("shm", segment.rank, segment.size, timeout, collectives)
        self._engine = Engine(segment, members)
        self._inboxes = Inboxes(segment)
        self._outboxes = [Outbox(segment, rank) for rank in range(segment.size)]

    def shutdown(self) -> None:
        self._engine.close()

    def _start(self, call: Call) -> SharedWork:
        def steps() -> Steps:
            for each in call.steps:
                yield from each
            call.finish()

        return self._engine.start(SharedWork(self._engine, call, is_collective=True), steps())

    def _send(self, call: Call, data: Tensor, target: int, tag: int) -> SharedWork:
        self._check_rank("send", target)
        steps = self._outboxes[target].send(data.view(torch.uint8), tag)
        return self._engine.start(SharedWork(self._engine, call), steps)

    def _receive(self, call: Call, buffer: Tensor, source: int | None, tag: int) -> SharedWork:
        if source is not None:
            self._check_rank("recv", source)
        work, buffer = SharedWork(self._engine, call), buffer.view(torch.uint8)
        steps = self._inboxes.receive(work, buffer, source, tag, call.finish)
        return self._engine.start(work, steps)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(f"{name}: there is no rank {rank} in a group of {self._size}")


def create_group(options: Any) -> SharedMemoryProcessGroup:
    """Return the group that `init_process_group` or `new_group` asks for; all members call this.

    Raises BackendError if the ranks are not on one host, or cannot see each other's processes;
    RuntimeError if not all of them come within the timeout.
    """
    rank, size = options.group_rank, options.group_size
    joining = _Joining(options.store, rank, size, options.timeout.total_seconds())
    segment = joining.create() if rank == 0 else joining.open()
    return SharedMemoryProcessGroup(segment, joining.members(segment), joining.timeout)


class _Joining:
    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size, self.timeout = store, rank, size, timeout
        self._deadline = time.monotonic() + timeout

    def create(self) -> Segment:
        """Create the segment, once it is known that all ranks can open it."""
        descriptor = segments.create(self._size)
        try:
            others = [json.loads(self._get(f"rank{rank}")) for rank in range(1, self._size)]
            for rank, other in enumerate(others, 1):
                self._store.delete_key(f"rank{rank}")
                if refusal := _refusal(_identity(), other, rank):
                    self._tell_all({"refused": refusal})
                    raise BackendError(refusal)
            segment = Segment(descriptor, self._rank, self._size)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._tell_all({"path": path})
            self._enter(segment)
            return segment
        finally:
            os.close(descriptor)

    def _tell_all(self, answer: dict[str, str]) -> None:
        for rank in range(1, self._size):
            self._store.set(f"answer{rank}", json.dumps(answer))

    def open(self) -> Segment:
        """Open the segment that rank 0 has created."""
        self._store.set(f"rank{self._rank}", json.dumps(_identity()))
        try:
            answer = json.loads(self._get(f"answer{self._rank}"))
        except RuntimeError:
            with suppress(RuntimeError):  # so that a later attempt does not take it for ours
                self._store.delete_key(f"rank{self._rank}")
            raise
        self._store.delete_key(f"answer{self._rank}")
        if "refused" in answer:
            raise BackendError(answer["refused"])
        segment = self._map(answer["path"])
        if segment is None:
            raise BackendError(
                f'backend="shm": rank {self._rank} cannot open the shared memory of rank 0; '
                'let all ranks run as one user, or use backend="gloo"'
            )
        self._enter(segment)
        return segment

    def _map(self, path: str) -> Segment | None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if os.fstat(descriptor).st_size != segments.bytes_for(self._size):
                return None
            return Segment(descriptor, self._rank, self._size)
        finally:
            os.close(descriptor)

    def _enter(self, segment: Segment) -> None:
        """Write this process into the segment, and wait until all have done so."""
        segment.words[segment.lines[self._rank] + PID] = os.getpid()
        segment.announce()
        for rank in range(self._size):
            while True:
                seen = segment.bells[rank]
                if segment.words[segment.lines[rank] + PID]:
                    break
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise timeout_error("new_group", self.timeout)
                segments.sleep(segment.addresses[rank], seen, min(left, 0.1))

    def _get(self, key: str) -> bytes:
        """Return the value of a key; wait for it. Raise RuntimeError after the timeout."""
        left = max(0.001, self._deadline - time.monotonic())
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError:
            if time.monotonic() < self._deadline:
                raise
            raise timeout_error("new_group", self.timeout) from None
        return self._store.get(key)

    def members(self, segment: Segment) -> dict[int, int]:
        """Return a descriptor for the process of each other rank, which tells when it has ended."""
        descriptors: dict[int, int] = {}
        for rank in range(self._size):
            pid = segment.words[segment.lines[rank] + PID]
            if rank != self._rank and pid != os.getpid():
                try:
                    descriptors[rank] = os.pidfd_open(pid)
                except OSError as error:
                    raise RuntimeError(f"the process of rank {rank} has ended") from error
        return descriptors


def _identity() -> dict[str, str]:
    """Return what two processes have in common if they can share memory by process id."""
    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "boot": boot, "processes": namespace}


def _refusal(own: dict[str, str], other: dict[str, str], rank: int) -> str:
    """Return why a rank cannot share memory with rank 0; "" if it can."""
    where = f"rank 0 runs on {own['host']!r} and rank {rank} on {other['host']!r}"
    if own["boot"] != other["boot"]:
        return f'backend="shm" needs all ranks on one host, and {where}; use backend="gloo"'
    if own["processes"] != other["processes"]:
        return (
            'backend="shm" needs ranks that see each other\'s processes, and they run in several '
            f'containers: {where}; use backend="gloo"'
        )
    return ""
