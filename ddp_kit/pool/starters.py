"""Who starts the processes of a pool: spawn, one at a time, or mpiexec, all at once."""

from __future__ import annotations

from ddp_kit.pool.folder import PrivateFolder
from ddp_kit.pool.mpi_job import START_TIMEOUT, MPIJob
from ddp_kit.pool.process import RankProcess


def starter_of(backend: str) -> str:
    """Return who starts the ranks of a backend; ranks of another starter are other processes."""
    return "mpiexec" if backend == "mpi" else "spawn"


class Spawn:
    """Starts each process by itself, so that one can be replaced or added."""

    def provide(self, ranks: list[RankProcess], world_size: int, broken: bool) -> bool:
        """Have at least `world_size` living processes in `ranks`; tell whether some are new.

        broken: some may have ended, or owe a reply that nobody waits for.
        """
        new = len(ranks) < world_size
        for index, rank in enumerate(ranks):
            # One that owes a reply may wait for the dead one in the group they were to form, or
            # be in a worker that a second interrupt has left behind.
            if broken and (rank.owed or not rank.alive):
                rank.stop()
                ranks[index] = RankProcess()
                new = True
        while len(ranks) < world_size:
            ranks.append(RankProcess())
        return new

    def wait(self) -> None:
        """Return at once: what is spawned is there."""

    def end(self) -> None:
        """Do nothing: nothing is left when the processes have ended."""


class MPIExec:
    """Has mpiexec start all processes. It can replace none and add none, so all start anew."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._job: MPIJob | None = None
        self._size = 0  # of the last job whose processes came

    def provide(self, ranks: list[RankProcess], world_size: int, broken: bool) -> bool:
        """Do as `Spawn.provide` does; but `ranks` stays empty until `wait` was called."""
        size = max(world_size, self._size)
        broken = broken and any(rank.owed or not rank.alive for rank in ranks)
        if self._job is None or self._job.ended or size > self._job.count or broken:
            for rank in ranks:
                rank.stop()
            ranks.clear()
            if self._job is not None:
                self._job.end()
            self._job = MPIJob(size, self._folder.socket)
        if ranks or not self._job.all_called:
            return False
        ranks += self._job.admit()
        self._size = size
        return True

    def wait(self) -> None:
        """Wait until mpiexec has started the processes; an interrupt ends them.

        Raises BackendError if it does not start them, in its own words.
        """
        assert self._job is not None, "provide has made it"
        self._job.wait(START_TIMEOUT)
        self._job.close_listener()

    def end(self) -> None:
        """End mpiexec, and with it what it has started."""
        self._size = 0
        if self._job is not None:
            self._job.end()
