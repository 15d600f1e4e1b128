"""`kit.torchrun`: a worker of a notebook on ranks that torchrun starts, here and on other hosts."""

from __future__ import annotations

import importlib.util
import inspect
import os
import random
import re
import shlex
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ddp_kit import settings
from ddp_kit.backends import LOOPBACK_ENVIRONMENT, choose_backend, threads_per_rank
from ddp_kit.errors import BackendError, KitError, MismatchError, PoolError
from ddp_kit.pool.arguments import (
    check_signature,
    check_timeout,
    explaining_arguments,
    whole_number,
)
from ddp_kit.pool.arguments import pack as pack_worker
from ddp_kit.pool.interrupts import holding_interrupt, show_interrupt
from ddp_kit.pool.launchers import Program
from ddp_kit.pool.live_view import print_output
from ddp_kit.pool.other_hosts import OtherHosts
from ddp_kit.pool.pool import check_world_size
from ddp_kit.pool.private_folder import PrivateFolder, sweep
from ddp_kit.pool.rank.torchrun_worker import Script, Task
from ddp_kit.pool.rank.torchrun_worker import pack as pack_task
from ddp_kit.pool.ranks import RankProcesses
from ddp_kit.pool.result import Result
from ddp_kit.pool.run_loop import Run
from ddp_kit.pool.wire.messages import SOCKET
from ddp_kit.trace import EMPTY, RankTrace, Snapshot, join, join_rank_traces

LEAVE_TIMEOUT = 10.0  # seconds for ranks that have finished to end by themselves, and their agent
REPORT_TIMEOUT = 10.0  # seconds for the agent to report which process failed first

# How the agent names the process that failed first: exit code or minus the signal, process id.
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")


@explaining_arguments("kit.torchrun(worker, *args, nproc_per_node=4)")
def torchrun(
    worker: Callable[..., Any] | str,
    *args: Any,
    nproc_per_node: int = settings.WORLD_SIZE,
    nnodes: int = 1,
    master_addr: str | None = None,
    master_port: int | None = None,
    backend: str = "auto",
    timeout: float | None = None,
    join_timeout: float = settings.JOIN_TIMEOUT,
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
    backend: as for `run`, without "mpi"; "shm" on one host only.
    join_timeout: seconds for the ranks of all hosts to connect. timeout: seconds from then on for
        the worker to return on every rank; None: no limit.

    A rank that fails ends the run: torchrun does not start the ranks again.

    Raises what `run` raises, also for deadlocks between hosts and for what ranks on other hosts
    raise; RankDiedError if one of them dies there; PoolError if a host is lost: its torchrun has
    ended, or nothing has come from it for 30 s. A process beside each rank answers for it, so a
    host whose ranks are busy, even in native code, is not lost. If this host is lost, the ranks of
    the others end within 30 s. What a rank on another host prints is printed there at once, and
    here at the end of the run, if the rank has returned or raised.
    """
    here = check_world_size(_check_number("nproc_per_node", nproc_per_node, 1))
    nnodes = _check_number("nnodes", nnodes, 1)
    _check_address(nnodes, master_addr, master_port)
    chosen = choose_backend(backend, here)
    if chosen == "mpi":
        raise BackendError('torchrun cannot start MPI ranks; use kit.run(..., backend="mpi")')
    if chosen == "shm" and nnodes > 1:
        raise BackendError('backend="shm" needs all ranks on one host; use backend="gloo"')
    check_timeout(timeout)
    check_timeout(join_timeout, "join_timeout", optional=False)
    if isinstance(worker, str):
        task = Task(_as_script(worker, args), args, None)
    else:
        check_signature(worker, args, set_by="nproc_per_node=")
        pack_worker(worker, args).close()  # raises for what cannot be sent
        task = Task(worker, args, chosen)
    job = _Job(task, here, nnodes)
    try:
        job.start(master_addr, master_port, join_timeout)
        return job.call(timeout)
    except KeyboardInterrupt as interrupt:
        show_interrupt(interrupt, job.run.positions() if job.run else [])
        raise
    finally:
        with holding_interrupt():
            job.on_end.close()


class _Job:
    """torchrun's agent on this host, and the run on its ranks.

    on_end: ends what was started, and removes the files, each even if another one fails.
    """

    agent: Torchrun
    processes: RankProcesses

    def __init__(self, task: Task, nproc_per_node: int, nnodes: int) -> None:
        self.task = task
        self.here, self.hosts = nproc_per_node, nnodes  # ranks on this host; hosts
        self.world_size = nproc_per_node * nnodes
        self.run: Run | None = None
        self.on_end = ExitStack()

    def start(self, address: str | None, port: int | None, join_timeout: float) -> None:
        rendezvous = choose_rendezvous(self.hosts, address, port)
        with holding_interrupt():
            sweep()
            folder = PrivateFolder()
            self.on_end.callback(folder.remove)
            file = Path(folder.file("program.py"))
            if rendezvous.store is not None:
                _, port = rendezvous.store
                file = Path(f"{_file_name(self.task.worker)}_for_port_{port}.py").absolute()
            _write(self.task, file)
            self.on_end.callback(file.unlink, missing_ok=True)
            self.agent = Torchrun(self.here, folder, str(file), rendezvous, join_timeout)
            self.on_end.callback(self.agent.end)
            self.processes = RankProcesses(self.agent, folder, init=False)
            self.on_end.callback(self.processes.dismiss, patience=0.0)
        rendezvous.print_commands(self.here, file, join_timeout)

    def call(self, timeout: float | None) -> Result:
        """Call the worker on the ranks of all hosts; print what those of other hosts printed."""
        run = self.run = Run(self.processes, self.here, 1)
        packed = pack_worker(self.task, ())
        try:
            result = run.execute(packed, self.task.backend or "gloo", timeout)
            if run.others is None:
                return result
            result = self._add_remote(result, run.others)
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
        self.processes.dismiss(LEAVE_TIMEOUT)
        self.agent.leave(LEAVE_TIMEOUT)  # the other agents wait for this one
        return result

    def _add_remote(self, result: Result, others: OtherHosts) -> Result:
        """Add what the ranks on other hosts have reported, and let them leave."""
        remote = range(self.here, self.world_size)
        values = [others.value(rank) for rank in remote]
        local = [RankTrace.of(result.trace, rank) for rank in range(self.here)]
        found = {snapshot.rank: snapshot for snapshot in others.snapshots()}
        alone = join([found.get(rank, Snapshot(rank, EMPTY)) for rank in range(self.world_size)])
        far = [RankTrace.of(alone, rank, others.clock(rank)) for rank in remote]
        traces = [replace(one, world_size=self.world_size) for one in (*local, *far)]
        others.release()
        output = (*result.output, *others.output())
        return Result((*result, *values), output, join_rank_traces(traces))


def _check_number(name: str, value: Any, least: int) -> int:
    number = whole_number(value)
    if number is None or number < least:
        raise PoolError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def _check_address(nnodes: int, master_addr: str | None, master_port: int | None) -> None:
    if nnodes == 1 and (master_addr, master_port) != (None, None):
        raise PoolError("one host needs no master_addr= and master_port=; leave them out")
    if not isinstance(master_addr, str | None):
        raise PoolError(f'master_addr must be a name such as "host0", got {master_addr!r}')
    if master_port is not None and _check_number("master_port", master_port, 1) > 65535:
        raise PoolError(f"master_port must be at most 65535, got {master_port}")


def _as_script(name: str, options: tuple) -> Script:
    """Return what runs a module or a file. Raise PoolError if it does not exist."""
    for option in options:
        if not isinstance(option, str):
            raise PoolError(f"the options of a module or file must be strings, got {option!r}")
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


def _write(task: Task, path: Path) -> None:
    """Write the file that torchrun runs. Raise PoolError, and leave nothing, if it cannot."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_source(task))
    except FileExistsError:
        raise PoolError(f"a file {path.name!r} is in the way; move it") from None
    except OSError as error:
        path.unlink(missing_ok=True)
        raise PoolError(f"cannot write {path.name!r} here: {error.strerror}") from error


def _source(task: Task) -> str:
    """Return the worker's source, for a reader, and the worker itself, for Python."""
    try:
        source = inspect.getsource(task.worker)
    except (OSError, TypeError):
        source = _file_name(task.worker)
    source = textwrap.indent(source.rstrip(), "# ")
    packed = "\n".join(f'    "{line}"' for line in textwrap.wrap(pack_task(task), 96))
    return f'''"""Written by kit.torchrun, for torchrun to start on each host. It runs this:"""

{source}

from ddp_kit.pool.rank import torchrun_worker

PACKED = (
{packed}
)

if __name__ == "__main__":
    torchrun_worker.run(PACKED)
'''


# --- the agent, and where it meets those of other hosts --------------------------------------


class Torchrun(Program):
    """The agent. When one of its processes fails, it ends all.

    count: its processes. script: the file that each of them runs. rendezvous: where it meets the
    agents of other hosts. timeout: seconds for the ranks of all hosts to come.
    """

    name = "torchrun"
    start_error = PoolError
    reusable = False

    def __init__(
        self,
        count: int,
        folder: PrivateFolder,
        script: str,
        rendezvous: Rendezvous,
        timeout: float,
    ) -> None:
        self.hosts, self.store, self._hint = rendezvous.hosts, rendezvous.store, rendezvous.hint
        options = [*rendezvous.options, "--nproc-per-node", str(count)]
        options += ["--log-dir", folder.file("logs"), script]
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        path = os.pathsep.join(filter(None, sys.path))
        # torchrun also takes options from these variables, which some clusters set.
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_"))}
        own |= LOOPBACK_ENVIRONMENT if self.hosts == 1 else {}
        own |= {"OMP_NUM_THREADS": str(threads_per_rank(count)), "PYTHONPATH": path}
        own[SOCKET] = folder.file("socket")
        super().__init__(count, own[SOCKET], command, own, timeout)

    def explain_start(self) -> str:
        reason = self.reason()
        printed = f"; torchrun's last error: {reason}" if reason else ""
        within = f"within {self._timeout:g} s"
        if self.ended:
            return f"torchrun ended before its ranks had started{printed}"
        if self._hint:
            return f"not all ranks connected {within}: {self._hint}{printed}"
        return f"torchrun did not start {self.count} ranks {within}{printed}"

    def first_end(self) -> tuple[int | None, int | None]:
        pids = {pid: rank for rank, pid, _ in self._calls}
        deadline = time.monotonic() + REPORT_TIMEOUT
        while self._first is None:
            over = self.ended or time.monotonic() > deadline
            for code, pid in _FAILED.findall(self.printed()):
                if int(pid) in pids:
                    self._first = pids[int(pid)], int(code)
            if self._first is None and over:
                self._first = None, 0  # it reports every other exit code
            elif self._first is None:
                time.sleep(0.02)
        return self._first


class Rendezvous(NamedTuple):
    """Where ranks meet.

    hosts: how many. options: torchrun's, on each of them. store: the address and port of the store
    that they share; None if torchrun chooses them. hint: what to do if ranks do not come.
    """

    hosts: int
    options: tuple[str, ...]
    store: tuple[str, int] | None = None
    hint: str = ""

    def print_commands(self, nproc_per_node: int, file: Path, seconds: float) -> None:
        """Print the command that starts the ranks of each other host, within `seconds`."""
        for host in range(1, self.hosts):
            own = ["--node-rank", str(host), "--nproc-per-node", str(nproc_per_node)]
            print(f"On host {host}, within {seconds:g} s; copy the file there if it is missing:")
            print(f"  {shlex.join(['torchrun', *self.options, *own, str(file)])}", flush=True)


def choose_rendezvous(hosts: int, address: str | None, port: int | None) -> Rendezvous:
    """Return where the ranks of so many hosts meet. Raise PoolError if they cannot."""
    if hosts == 1:
        return Rendezvous(1, ("--standalone", "--local-addr", "127.0.0.1"))
    address, port = _choose_address(address, port)
    others = "host 1" if hosts == 2 else f"hosts 1 to {hosts - 1}"
    hint = (
        f"start those of {others} with the command above, each host with its own --node-rank, "
        "and check that they can reach the address in it"
    )
    options = ("--nnodes", str(hosts), "--master-addr", address, "--master-port", str(port))
    return Rendezvous(hosts, options, (address, port), hint)


def _choose_address(address: str | None, port: int | None) -> tuple[str, int]:
    """Return an address and a port, which is free now. Raise PoolError if there is none."""
    address = address or socket.gethostname()
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror:
        raise PoolError(
            f"this host cannot resolve the name {address!r}; set master_addr= to a name or an "
            "address of this host that the other hosts can reach"
        ) from None
    # On Linux, outgoing connections take ports from 32768 on by default. SystemRandom leaves the
    # learner's seed alone.
    for chosen in [port] if port else random.SystemRandom().sample(range(20000, 30000), 20):
        try:
            socket.create_server(("", chosen)).close()
            return address, chosen
        except OSError as error:
            reason = error.strerror
    tried = f"port {port}" if port else "each of 20 ports between 20000 and 29999"
    raise PoolError(
        f"{tried} of this host is unavailable ({reason}); "
        f"{'leave out master_port= to use' if port else 'set master_port= to'} a free one"
    )
