"""`kit.torchrun`: a worker of a notebook on ranks that torchrun starts, here and on other hosts."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_kit.backends import LOOPBACK_ENVIRONMENT, choose_backend, threads_per_rank
from ddp_kit.errors import (
    BackendError,
    KitError,
    MismatchError,
    PoolError,
    RankDiedError,
    RankError,
)
from ddp_kit.pool.arguments import (
    check_signature,
    check_timeout,
    explaining_arguments,
    whole_number,
)
from ddp_kit.pool.arguments import pack as pack_worker
from ddp_kit.pool.interrupts import holding_interrupt, show_interrupt
from ddp_kit.pool.launchers.torchrun import (
    Rendezvous,
    Torchrun,
    TorchrunProgram,
    choose_rendezvous,
)
from ddp_kit.pool.other_hosts import OtherHosts
from ddp_kit.pool.pool import check_world_size
from ddp_kit.pool.rank.torchrun_worker import Program, Script
from ddp_kit.pool.rank.torchrun_worker import pack as pack_program
from ddp_kit.pool.rank_processes import RankProcesses
from ddp_kit.pool.result import Result
from ddp_kit.pool.run import Run
from ddp_kit.pool.view import print_output
from ddp_kit.pool.wire.private_folder import PrivateFolder, sweep
from ddp_kit.trace import EMPTY, RankTrace, Snapshot, join, join_rank_traces

LEAVE_TIMEOUT = 10.0  # seconds for ranks that have finished to end by themselves, and their agent


@explaining_arguments("kit.torchrun", "nproc_per_node=")
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
    nproc_per_node: ranks on each host. nnodes: number of hosts, including this one. For each of
        the others a command is printed that starts its ranks. That host needs the file that the
        command names, the kit, and what the worker imports. A file that is run by name must have
        the same path there.
    master_addr, master_port: where the ranks meet: a name or address of this host that the
        others can reach, by default its name, and a port, by default a free one.
    backend: as for `run`, without "mpi"; "shm" on one host only. max_restarts: how often torchrun
        restarts all ranks after one has failed; on one host only.
    join_timeout: seconds for the ranks of all hosts to connect. timeout: seconds from then on for
        the worker to return on every rank, in each attempt; None: no limit.

    Raises what `run` raises, also for deadlocks between hosts and for what ranks on other hosts
    raise; RankDiedError if one of them dies there; PoolError if a host is lost: its torchrun has
    ended, or nothing has come from it for 30 s. A process beside each rank answers for it, so a
    host whose ranks are busy, even in native code, is not lost. If this host is lost, the ranks of
    the others end within 30 s. What a rank on another host prints is printed there at once, and
    here at the end of the run, if the rank has returned or raised.
    """
    nproc_per_node = _check_number("nproc_per_node", nproc_per_node, 1)
    nnodes = _check_number("nnodes", nnodes, 1)
    max_restarts = _check_number("max_restarts", max_restarts, 0)
    chosen = _check(
        worker, args, nproc_per_node, nnodes, backend, max_restarts, master_addr, master_port
    )
    check_timeout(timeout)
    check_timeout(join_timeout, "join_timeout", optional=False)
    if isinstance(worker, str):
        program = Program(_as_script(worker), args, None)
    else:
        program = Program(worker, args, chosen)
    job = _Job(program, nproc_per_node, nnodes, max_restarts)
    try:
        job.start(master_addr, master_port, join_timeout)
        return job.run(timeout)
    except KeyboardInterrupt as interrupt:
        show_interrupt(interrupt, job.last.positions() if job.last else [])
        raise
    finally:
        with holding_interrupt():
            job.end()


class _Job:
    """torchrun's agent on this host, and the runs on its ranks."""

    def __init__(self, program: Program, nproc_per_node: int, nnodes: int, restarts: int) -> None:
        self.program, self.restarts = program, restarts
        self.here, self.hosts = nproc_per_node, nnodes  # ranks on this host; hosts
        self.world_size = nproc_per_node * nnodes
        self.launcher: Torchrun | None = None
        self.processes: RankProcesses | None = None
        self.folder: PrivateFolder | None = None
        self.file: Path | None = None
        self.last: Run | None = None

    def start(self, address: str | None, port: int | None, join_timeout: float) -> None:
        """Start the agent, and print how to start those of the other hosts."""
        rendezvous = choose_rendezvous(self.hosts, address, port)
        with holding_interrupt():
            sweep()
            self.folder = PrivateFolder()
            file = self._write_script(rendezvous)
            variables = {"OMP_NUM_THREADS": str(threads_per_rank(self.here))}
            if self.hosts == 1:
                variables |= LOOPBACK_ENVIRONMENT
            options = [*rendezvous.options, "--nproc-per-node", str(self.here)]
            options += ["--max-restarts", str(self.restarts), "--log-dir", self.folder.logs]
            agent = TorchrunProgram(
                self.here, self.folder, options, str(file), variables, rendezvous.hint
            )
            self.launcher = Torchrun(agent, rendezvous, join_timeout)
            self.processes = RankProcesses(self.launcher, self.folder, init=False)
        rendezvous.print_commands(self.here, file, join_timeout)

    def _write_script(self, rendezvous: Rendezvous) -> Path:
        assert self.folder is not None, "start has created it"
        file = Path(self.folder.program)
        if rendezvous.store is not None:
            _, port = rendezvous.store
            file = Path(f"{_file_name(self.program.worker)}_for_port_{port}.py").absolute()
        _write(self.program, file)
        self.file = file
        return file

    def run(self, timeout: float | None) -> Result:
        """Call the worker, again for each restart; return the result of the last attempt."""
        assert self.launcher is not None, "start has created it"
        assert self.processes is not None, "likewise"
        failed: KitError | None = None
        for attempt in range(self.restarts + 1):
            run = self.last = Run(self.processes, self.here, attempt + 1)
            try:
                result = self._execute(run, timeout)
            except KitError as error:
                if failed and not self.processes.ranks:
                    raise failed from None  # the agent has not restarted them
                if attempt < self.restarts:
                    self.processes.dismiss(LEAVE_TIMEOUT)  # the agent waits for their exit codes
                # torchrun restarts after a process has failed, and after nothing else.
                if attempt == self.restarts or not isinstance(error, (RankError, RankDiedError)):
                    raise
                failed = error
                print(f"{str(error).splitlines()[0]}")
                print(f"torchrun restarts all ranks: {attempt + 1} of {self.restarts}")
                self.launcher.expect_restart()
            else:
                if self.hosts > 1 or attempt < self.restarts:
                    self.processes.dismiss(LEAVE_TIMEOUT)
                if self.hosts > 1:
                    self.launcher.leave(LEAVE_TIMEOUT)  # the other agents wait for this one
                return result
        raise AssertionError("the last attempt returns or raises")

    def _execute(self, run: Run, timeout: float | None) -> Result:
        """Call the worker on the ranks of all hosts; print what those of other hosts printed."""
        packed = pack_worker(self.program, ())
        try:
            result = run.execute(packed, self.program.backend or "gloo", timeout)
        except KitError as error:
            if run.others is not None:
                here = error.output or ("",) * self.here
                error.output = (*here, *run.others.output())
                if isinstance(error, MismatchError) and error.result is not None:
                    error.result = self._add_remote(error.result, run.others)
            raise
        finally:
            if run.others is not None:
                interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
                print_output([*[""] * self.here, *run.others.output()], kept=not interrupted)
        return result if run.others is None else self._add_remote(result, run.others)

    def _add_remote(self, result: Result, others: OtherHosts) -> Result:
        """Add what the ranks on other hosts have reported, and let them leave."""
        remote = range(self.here, self.world_size)
        values = [others.value(rank) for rank in remote]
        local = [RankTrace.of(result.trace, rank, "") for rank in range(self.here)]
        found = {snapshot.rank: snapshot for snapshot in others.snapshots()}
        alone = join([found.get(rank, Snapshot(rank, EMPTY)) for rank in range(self.world_size)])
        far = [RankTrace.of(alone, rank, "", others.clock(rank)) for rank in remote]
        traces = [replace(one, world_size=self.world_size) for one in (*local, *far)]
        others.release()
        output = (*result.output, *others.output())
        return Result((*result, *values), output, join_rank_traces(traces))

    def end(self) -> None:
        """End the agent and everything it has started; remove the files."""
        with ExitStack() as stack:  # each of these happens even if another one raises
            if self.folder is not None:
                stack.callback(self.folder.remove)
            if self.file is not None and self.hosts > 1:
                stack.callback(self.file.unlink, missing_ok=True)
            if self.processes is not None:
                stack.callback(self.processes.launcher.end)
                stack.callback(self.processes.dismiss, patience=0.0)


def _check(
    worker: Callable[..., Any] | str,
    args: tuple,
    nproc_per_node: int,
    nnodes: int,
    backend: str,
    max_restarts: int,
    master_addr: str | None,
    master_port: int | None,
) -> str:
    """Return the backend. Raise PoolError or BackendError for what cannot be run."""
    if nnodes > 1 and max_restarts > 0:
        raise PoolError(
            "max_restarts= works on one host only; for several, run torchrun on each of them with "
            "--rdzv-backend c10d, which restarts all ranks together"
        )
    if nnodes == 1 and (master_addr, master_port) != (None, None):
        raise PoolError("one host needs no master_addr= and master_port=; leave them out")
    if not isinstance(master_addr, str | None):
        raise PoolError(f'master_addr must be a name such as "host0", got {master_addr!r}')
    if master_port is not None:
        _check_number("master_port", master_port, 1)
        if master_port > 65535:
            raise PoolError(f"master_port must be at most 65535, got {master_port}")
    check_world_size(nproc_per_node)
    chosen = choose_backend(backend, nproc_per_node)
    if chosen == "mpi":
        raise BackendError('torchrun cannot start MPI ranks; use kit.run(..., backend="mpi")')
    if chosen == "shm" and nnodes > 1:
        raise BackendError('backend="shm" needs all ranks on one host; use backend="gloo"')
    if isinstance(worker, str):
        for arg in args:
            if not isinstance(arg, str):
                raise PoolError(f"the options of a module or file must be strings, got {arg!r}")
    else:
        check_signature(worker, args, set_by="nproc_per_node=")
        pack_worker(worker, args).close()  # raises for what cannot be sent
    return chosen


def _check_number(name: str, value: Any, least: int) -> int:
    number = whole_number(value)
    if number is None or number < least:
        raise PoolError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def _as_script(name: str) -> Script:
    """Return what runs a module or a file. Raise PoolError if it does not exist."""
    hint = "name a module or a file, or pass a function"
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise PoolError(f"there is no file {name!r}; {hint}")
        return Script(os.path.abspath(name))
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise PoolError(f"there is no module {name!r}; {hint}")
    return Script(name)


def _file_name(worker: Callable[..., Any]) -> str:
    """Return a worker's name as part of a file's name, where "<lambda>" is not allowed."""
    name = worker.name if isinstance(worker, Script) else getattr(worker, "__name__", "worker")
    return re.sub(r"\W", "", Path(name).stem) or "worker"


def _write(program: Program, path: Path) -> None:
    """Write the file that torchrun runs. Raise PoolError, and leave nothing, if it cannot."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_source(program))
    except FileExistsError:
        raise PoolError(f"a file {path.name!r} is in the way; move it") from None
    except OSError as error:
        path.unlink(missing_ok=True)
        raise PoolError(f"cannot write {path.name!r} here: {error.strerror}") from error


def _source(program: Program) -> str:
    """Return the worker's source, for a reader, and the worker itself, for Python."""
    try:
        source = inspect.getsource(program.worker)
    except (OSError, TypeError):
        source = _file_name(program.worker)
    source = textwrap.indent(source.rstrip(), "# ")
    packed = "\n".join(f'    "{line}"' for line in textwrap.wrap(pack_program(program), 96))
    return f'''"""Written by kit.torchrun, for torchrun to start on each host. It runs this:"""

{source}

from ddp_kit.pool.rank import torchrun_worker

PACKED = (
{packed}
)

if __name__ == "__main__":
    torchrun_worker.run(PACKED)
'''
