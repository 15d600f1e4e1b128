"""`kit.torchrun`: a worker of a notebook on ranks that torchrun starts, here and on other hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_kit.backends import LOOPBACK_ENVIRONMENT, threads_per_rank
from ddp_kit.errors import (
    DeadlockError,
    KitError,
    MismatchError,
    PoolError,
    RankError,
    RunTimeoutError,
)
from ddp_kit.failures import name_ranks
from ddp_kit.launch import program_file
from ddp_kit.launch.meeting import check, meet
from ddp_kit.launch.program import COLLECT_TIMEOUT, Program, Said, Told
from ddp_kit.pool import view
from ddp_kit.pool.crew import send_job
from ddp_kit.pool.folder import PrivateFolder, sweep
from ddp_kit.pool.interrupts import holding_interrupt, show_interrupt
from ddp_kit.pool.messages import Form
from ddp_kit.pool.outcome import START_TIMEOUT, Outcome
from ddp_kit.pool.process import RankProcess
from ddp_kit.pool.request import check_timeout, look_around
from ddp_kit.pool.request import pack as pack_worker
from ddp_kit.pool.result import Result, print_output
from ddp_kit.pool.torchrun_job import TorchrunJob
from ddp_kit.trace import RankTrace, join_rank_traces

LEAVE_TIMEOUT = 10.0  # seconds for ranks that are done to end by themselves, and for their agent


def torchrun(
    worker: Callable[..., Any] | str,
    *args: Any,
    nproc_per_node: int = 4,
    nnodes: int = 1,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str = "auto",
    max_restarts: int = 0,
    timeout: float | None = None,
    join_timeout: float = 300.0,
) -> Result:
    """Call `worker(rank, world_size, *args)` on ranks that torchrun starts; return as `run` does.

    worker: a function; or the name of a module or of a file, which is run with `args` as its
        options, and forms a process group itself.
    nproc_per_node: ranks on each host. nnodes: hosts, this one among them. For each other one
        a line is printed that starts its ranks; it needs the file that the line names, the kit, and
        what the worker imports. A file that is run by name must have the same path there.
    master_addr, master_port: where the ranks meet: a name or address of this host that the
        others can reach, by default its name, and a port, by default a free one.
    backend: as for `run`, without "mpi". max_restarts: how often torchrun starts all ranks again
        after one has failed; on one host only.
    join_timeout: seconds for the ranks of all hosts to come. timeout: seconds from then on for the
        worker to return on every rank, in each attempt; None lets it last.

    Raises what `run` raises. Ranks on other hosts are not watched: a deadlock with them ends after
    five minutes, by PyTorch's own limit. What they print from Python comes in the end, and they
    must return at most five minutes after rank 0.
    """
    chosen = check(
        worker, args, nproc_per_node, nnodes, backend, max_restarts, master_addr, master_port
    )
    check_timeout(timeout)
    check_timeout(join_timeout, "join_timeout", optional=False)
    if isinstance(worker, str):
        program = Program(program_file.as_script(worker), args, None)
    else:
        program = Program(worker, args, chosen)
    run = _Run(program, nproc_per_node, nnodes, max_restarts)
    try:
        return run.start(master_addr, master_port, timeout, join_timeout)
    except KeyboardInterrupt as interrupt:
        show_interrupt(interrupt, run.where_ranks_were())
        raise
    finally:
        with holding_interrupt():
            run.end()


class _Run:
    """One agent of torchrun's on this host, and what its ranks said."""

    def __init__(self, program: Program, nproc_per_node: int, nnodes: int, restarts: int) -> None:
        self.program, self.restarts = program, restarts
        self.here, self.hosts = nproc_per_node, nnodes  # ranks on this host; hosts
        self.folder: PrivateFolder | None = None
        self.job: TorchrunJob | None = None
        self.file: Path | None = None
        self.where_ranks_were: Callable[[], list[str]] = list

    @property
    def world_size(self) -> int:
        return self.here * self.hosts

    def start(
        self, address: str | None, port: int | None, timeout: float | None, join_timeout: float
    ) -> Result:
        """Have torchrun start the ranks, as often as it may; return what came of it."""
        around = look_around()
        meeting = meet(self.hosts, address, port)
        with holding_interrupt():
            sweep()
            self.folder = PrivateFolder()
            file = Path(self.folder.program)
            if self.hosts > 1:
                name = f"{program_file.name_of(self.program.worker)}_for_port_{meeting.port}.py"
                file = Path(name).absolute()
            program_file.write(self.program, file)
            self.file = file
            options = [*meeting.options, "--max-restarts", str(self.restarts)]
            more = {"OMP_NUM_THREADS": str(threads_per_rank(self.here))}
            if self.hosts == 1:
                more |= LOOPBACK_ENVIRONMENT
            self.job = TorchrunJob(self.here, self.folder, options, str(file), more, meeting.advice)
        meeting.tell_hosts(self.here, file, join_timeout)
        shown = view.open_view(self.world_size)
        failed: KitError | None = None
        for attempt in range(self.restarts + 1):
            try:
                self.job.wait(join_timeout)
            except KitError as error:
                raise failed or error from None
            try:
                return self._attempt(shown, around, attempt, timeout)
            except (DeadlockError, MismatchError, RunTimeoutError):
                raise  # they would come again, or the time is over
            except KitError as error:
                if attempt == self.restarts:
                    raise
                failed = error
                print(f"{str(error).splitlines()[0]}")
                print(f"torchrun starts all ranks again: {attempt + 1} of {self.restarts}")
                self.job.forget()
        raise AssertionError("the last attempt returns or raises")

    def _attempt(
        self, shown: view.View, around: Any, attempt: int, timeout: float | None
    ) -> Result:
        ranks = self.job.admit()
        outcome, over = Outcome(ranks, shown), False
        try:
            for number, rank in enumerate(ranks):
                rank.send(Form(number, self.world_size, self.program.backend or "gloo", None))
            if outcome.collect(START_TIMEOUT):
                outcome = Outcome(ranks, shown, attempt + 1, watched=self.hosts == 1)
                parcel = pack_worker(self.program, ())
                send_job(ranks, parcel, around, attempt + 1)
                outcome.collect(timeout)
            over = True
        finally:
            with holding_interrupt():
                output = outcome.close()
                self.where_ranks_were = outcome.told
            if not over:  # it was interrupted
                print_output(output)
        self._let_go(ranks, wait=self.hosts > 1 or attempt < self.restarts)
        try:
            result = outcome.result(output)
        except BaseException:
            print_output(output)
            raise
        joined = self._join(result)
        if self.hosts > 1:
            self.job.leave(LEAVE_TIMEOUT)  # the other agents wait for this one
        return joined

    def _join(self, result: Result) -> Result:
        """Put what ranks on other hosts have told beside what those of this one returned."""
        said: list[Said] = list(result)
        elsewhere: dict[int, Told] = {}
        for one in said:
            elsewhere |= one.elsewhere
        others = [elsewhere.get(rank, Told()) for rank in range(self.here, self.world_size)]
        output = [*result.output, *(told.output for told in others)]
        print_output(output)
        failures = {told.failure.rank: told.failure for told in others if told.failure}
        if failures:
            raise RankError(failures)
        lost = [rank for rank in range(self.here, self.world_size) if rank not in elsewhere]
        if lost:
            raise PoolError(
                f"nothing came from {name_ranks(lost)}, on another host, within "
                f"{COLLECT_TIMEOUT:g} s after rank 0 had returned; a barrier at the end of the "
                "worker has all ranks end together"
            )
        values = [*(one.value for one in said), *(told.value for told in others)]
        trace = result.trace
        if others:
            own = [RankTrace.of(trace, rank, "") for rank in range(self.here)]
            parts = [*own, *(told.part for told in others if told.part)]
            trace = join_rank_traces([replace(part, world_size=self.world_size) for part in parts])
        return Result(tuple(values), tuple(output), trace)

    def _let_go(self, ranks: list[RankProcess], wait: bool) -> None:
        """Have ranks that are done leave; by themselves, if others go by their exit codes."""
        for rank in ranks:
            rank.dismiss()
        deadline = time.monotonic() + (LEAVE_TIMEOUT if wait else 0)
        for rank in ranks:
            rank.stop(patience=max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the agent and what it has started; remove what it has left."""
        if self.job is not None:
            self.job.end()
        if self.file is not None and self.hosts > 1:
            self.file.unlink(missing_ok=True)
        if self.folder is not None:
            self.folder.remove()
