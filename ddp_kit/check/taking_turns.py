"""Ranks that share memory and run one at a time, in a given order, for the graders of lesson 21."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

LENGTH = 7  # of a tensor; no number of ranks from 2 to 5 divides it
_START = 4096  # bytes of shared memory before the slots


class StuckError(BaseException):
    """All ranks wait, and nothing can change any more; no `except Exception` stops it."""


class Turns:
    """Lets ranks run one at a time, so only the one whose turn it is touches shared memory.

    order: of the ranks that could run, the first one in it does.
    """

    def __init__(self, rank: int, order: Sequence[int]) -> None:
        self.rank, self.order, size = rank, order, len(order)
        nbytes = _START + size * LENGTH * 4
        self.memory = _share(rank, nbytes)
        numbers = memoryview(self.memory)[:_START].cast("q")
        self._state, numbers = numbers[:3], numbers[3:]  # whose turn, version, whether stuck
        self._slept_at, self._done = numbers[:size], numbers[size : 2 * size]
        self.flags, self.counts = numbers[2 * size : 3 * size], numbers[3 * size : 4 * size]
        floats = torch.frombuffer(self.memory, dtype=torch.float32, offset=_START)
        self.slots = list(floats.view(size, LENGTH))

    def begin(self) -> None:
        """Wait for the first turn."""
        if self.rank == self.order[0]:
            self._state[0] = self.rank + 1
        self._wait()

    def changed(self) -> None:
        """Note that something has changed for which others may wait."""
        self._state[1] += 1

    def pause(self) -> None:
        """Let others run until something has changed; raise StuckError if nothing can."""
        self._slept_at[self.rank] = self._state[1] + 1
        self._pass_on()
        self._wait()

    def end(self) -> None:
        """Let the others run from now on."""
        self._done[self.rank] = 1
        self._pass_on()

    def meet(self) -> None:
        """Wait until all ranks have called this as often."""
        self.counts[self.rank] += 1
        self.changed()
        while min(self.counts) < self.counts[self.rank]:
            self.pause()

    def _pass_on(self) -> None:
        asleep = self._state[1] + 1
        for rank in self.order:
            if not self._done[rank] and self._slept_at[rank] != asleep:
                self._state[0] = rank + 1
                return
        self._state[2] = 1

    def _wait(self) -> None:
        looks = 0
        while self._state[0] != self.rank + 1 and not self._state[2]:
            looks += 1
            time.sleep(0 if looks < 100 else 0.001)  # the run has a time limit
        if self._state[2]:
            raise StuckError


class Flags:
    """The flags of 21.1, as a rank may use them: it reads all and writes its own."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __len__(self) -> int:
        return len(self._turns.flags)

    def __getitem__(self, rank: int) -> int:
        return self._turns.flags.tolist()[rank]  # raises IndexError, which ends a loop over them

    def __setitem__(self, rank: int, number: int) -> None:
        own = self._turns.rank
        if rank != own:
            raise ValueError(f"rank {own} wrote the flag of rank {rank}")
        self._turns.flags[own] = number
        self._turns.changed()


def _share(rank: int, nbytes: int) -> mmap.mmap:
    """Return memory that all ranks share. Raises RuntimeError on systems other than Linux."""
    own, where = -1, [""]
    if rank == 0:
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("this exercise needs Linux, for os.memfd_create")
        own = os.memfd_create("exercise")
        os.ftruncate(own, nbytes)
        where = [f"/proc/{os.getpid()}/fd/{own}"]
    dist.broadcast_object_list(where, src=0)
    with open(where[0], "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), nbytes)
    dist.barrier()
    if rank == 0:
        os.close(own)
    return memory


def orders(n: int) -> list[list[int]]:
    """Return the orders in which n ranks shall take turns: the first rank first, and last."""
    ranks = list(range(n))
    return [ranks, ranks[::-1]] if n > 1 else [ranks]
