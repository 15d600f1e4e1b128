"""The processes of a pool, and the process group that they form."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress

from ddp_kit.errors import KitError, PoolError
from ddp_kit.failures import name_ranks
from ddp_kit.pool import cells, modules, view
from ddp_kit.pool.folder import PrivateFolder
from ddp_kit.pool.interrupts import holding_interrupt
from ddp_kit.pool.messages import Form, Run, Surroundings
from ddp_kit.pool.process import RankProcess
from ddp_kit.pool.starters import MPIExec, Spawn
from ddp_kit.pool.values import Parcel


def send_job(ranks: list[RankProcess], parcel: Parcel, around: Surroundings, run: int) -> None:
    """Have these ranks call the worker in the parcel, which is used up by it."""
    sources = cells.cell_sources()
    for rank in ranks:
        rank.drain_output()
        rank.take_output()  # what came between two runs belongs to none
        new = {name: text for name, text in sources.items() if name not in rank.cells_seen}
        surroundings = None if around == rank.surroundings else around
        rank.send(Run(parcel, new, surroundings, run))
        rank.cells_seen |= new.keys()
        rank.surroundings = around
    parcel.close()


class Crew:
    """The ranks of one pool: started when they are missing, replaced when they are broken.

    by_mpiexec: who starts them; else they are spawned. init: False leaves the group to the worker.
    """

    def __init__(self, by_mpiexec: bool, init: bool) -> None:
        self.ranks: list[RankProcess] = []
        self.folder = PrivateFolder()
        self.starter = MPIExec(self.folder) if by_mpiexec else Spawn()
        self._init = init
        self._groups = 0
        self._formed: tuple[int, str] | None = None  # the group that the ranks were told to form
        self._in_job = False  # a worker was sent; a rank that still owes a reply may be in it
        _crews.add(self)

    @property
    def backend(self) -> str | None:
        """The backend of the group that the ranks were told to form, if there is one."""
        return self._formed[1] if self._formed else None

    def get_ready(self, world_size: int, backend: str) -> None:
        """Have `world_size` ranks that were told to form a group.

        Raises BackendError or PoolError if they cannot be started.
        """
        with holding_interrupt():
            self.form(world_size, backend)
        if len(self.ranks) < world_size:  # mpiexec takes its time, and may be interrupted
            self.starter.wait()
            with holding_interrupt():
                self.form(world_size, backend)
        if len(self.ranks) < world_size:
            raise PoolError("the ranks ended before they were ready; try again")

    def form(self, world_size: int, backend: str) -> None:
        """Have `world_size` living processes in one group, at the price of what is missing.

        What mpiexec has not started yet is left to the next call.
        """
        if _leaving:
            return
        broken = self._in_job or not all(rank.alive for rank in self.ranks)
        if broken:
            self._formed, self._in_job = None, False
        if self.starter.provide(self.ranks, world_size, broken):
            self._formed = None
        if self._formed == (world_size, backend) or len(self.ranks) < world_size:
            return
        self._groups += 1
        store = self.folder.store(self._groups) if self._init else None
        for number, rank in enumerate(self.ranks[:world_size]):
            rank.send(Form(number, world_size, backend, store))
        self._formed = (world_size, backend)

    def send_job(
        self, ranks: list[RankProcess], parcel: Parcel, around: Surroundings, run: int
    ) -> None:
        """Have these ranks call the worker in the parcel."""
        self._in_job = True
        send_job(ranks, parcel, around, run)

    def end_job(self, intact: bool) -> None:
        """Note that the run is over, and that those who owe a reply were stopped.

        intact: the group is as it was. Else it is formed anew, ready while the learner reads.
        """
        self._in_job = False
        if not intact and self._formed:
            formed, self._formed = self._formed, None
            with suppress(KitError):  # the next run tries again, and tells it
                self.form(*formed)

    def end_old_code(self, world_size: int) -> None:
        """End the ranks that have imported a file which was changed since."""
        files = modules.changed([rank.modules for rank in self.ranks[:world_size]])
        old = [number for number, changed in enumerate(files) if changed]
        if old:
            with holding_interrupt():
                for number in old:
                    self.ranks[number].stop()
            names = " and ".join(sorted({os.path.basename(file) for file in set().union(*files)}))
            view.say(f"{names} changed on disk: starting {name_ranks(old)} afresh")

    def end(self) -> None:
        """End every process."""
        ranks, self.ranks, self._formed = self.ranks, [], None
        for rank in ranks:
            rank.dismiss()  # all at once: they leave side by side
        deadline = time.monotonic() + 1.0
        for rank in ranks:
            # One that owes a reply is busy, or has not even started: nothing to wait for.
            rank.stop(patience=0.0 if rank.owed else max(0.0, deadline - time.monotonic()))
        self.starter.end()


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
_leaving = False  # the notebook's kernel is about to end


def leave(leaving: bool) -> None:
    """End the ranks of every pool, because this process is about to end; False: it stays.

    A kernel that shuts down sends its children SIGTERM and waits until they are reaped, which
    nobody would do: its main thread is idle, or in the middle of a run. Called in any thread.
    """
    global _leaving
    _leaving = leaving
    crews = list(_crews) if leaving else []
    ranks = [rank for crew in crews for rank in list(crew.ranks)]
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join(1)
    for crew in crews:
        crew.starter.end()
