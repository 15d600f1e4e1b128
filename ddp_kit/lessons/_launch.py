"""The ranks of a lesson, whatever has started them, and its command line.

Spawned: the shared pool runs the worker on its processes, and this process, which is not a rank,
gets the result. Under torchrun and mpiexec: every process is a rank and runs the worker itself;
the results are gathered, so that each process has all of them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from ddp_kit import backends, pool, settings
from ddp_kit.backends import mpi
from ddp_kit.comparison import Comparison
from ddp_kit.errors import BackendError, KitError, PoolError, ProofError
from ddp_kit.pool.ipython import shell
from ddp_kit.pool.live_view import print_output
from ddp_kit.pool.rank import torchrun_environment
from ddp_kit.pool.result import Result
from ddp_kit.trace import (
    EMPTY,
    BoardCopy,
    Snapshot,
    Trace,
    TraceFolder,
    join,
    recording,
    unrecorded,
)


class Ranks:
    """The ranks of a lesson; call it with a worker to run that worker on all of them.

    rank: of this process; None: the ranks are spawned, and this process is not one of them.
    folder: where to write the trace of each run; None: nowhere.
    run: runs a worker on spawned ranks; None: the shared pool does.
    join: if workers form their own group and every process is a rank, the function that forms one
        to gather results in.
    """

    def __init__(
        self,
        world_size: int,
        backend: str,
        rank: int | None = None,
        folder: TraceFolder | None = None,
        run: Callable[..., Result] | None = None,
        join: Callable[[], None] | None = None,
    ) -> None:
        self.world_size = world_size
        self.backend = backend
        self._rank, self._folder, self._join_group = rank, folder, join
        self._run = run or functools.partial(pool.run, world_size=world_size, backend=backend)

    def __str__(self) -> str:
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"

    def __call__(self, worker: Callable[..., Any], *args: Any) -> Result:
        """Run `worker(rank, world_size, *args)` on every rank; return the result."""
        if self._rank is None:
            return self._run_spawned(worker, *args)
        printed = io.StringIO()
        try:
            with recording() as recorder, redirect_stdout(printed):
                value = worker(self._rank, self.world_size, *args)
        finally:
            if self._folder is not None:
                board = recorder.table.board
                logs = [board.read() if r == self._rank else EMPTY for r in range(self.world_size)]
                self._keep(worker, self._join(logs), [self._rank])
        with unrecorded(), self._group():
            parts: list[Any] = [None] * self.world_size
            dist.all_gather_object(parts, (value, printed.getvalue(), recorder.table.board.read()))
        values, output, logs = zip(*parts, strict=True)
        if self._rank == 0:
            print_output(output)
        return Result(values, output, self._join(logs))

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Have a process group to gather results in; bare ranks have one only in this block."""
        if self._join_group is None:
            yield
            return
        if dist.is_initialized():  # the worker has left it
            dist.destroy_process_group()
        self._join_group()
        try:
            yield
        finally:
            dist.destroy_process_group()

    def _run_spawned(self, worker: Callable[..., Any], *args: Any) -> Result:
        everyone = range(self.world_size)
        try:
            result = self._run(worker, *args)
        except KitError as error:
            self._keep(worker, getattr(error, "trace", None), everyone)
            raise
        self._keep(worker, result.trace, everyone)
        return result

    def _join(self, logs: Iterable[BoardCopy]) -> Trace:
        return join(list(map(Snapshot, range(self.world_size), logs)))

    def _keep(self, worker: Callable[..., Any], trace: Trace | None, ranks: Iterable[int]) -> None:
        """Write the traces of `ranks` into the folder of --trace, if there is one."""
        if self._folder is not None and trace is not None:
            self._folder.write(getattr(worker, "__name__", "worker"), trace, ranks)

    def agree_on_folder(self) -> None:
        """Make the traces of all processes fit together, once all have joined."""
        if self._folder is not None:
            with self._group():
                self._folder.clock = torchrun_environment.compare_clocks()

    def say(self, line: str) -> None:
        """Print a line in one process only."""
        if self._rank in (None, 0):
            print(line)


@contextmanager
def open_ranks(
    world_size: int | None = None,
    backend: str = "auto",
    trace: str | None = None,
    init: bool = True,
) -> Iterator[Ranks]:
    """Yield the ranks that torchrun or mpiexec started, or ranks of the shared pool.

    trace: the folder into which the trace of each run is written, for `kit.load_trace`.
    init: False leaves `init_process_group` to the workers; spawned ranks then have a pool of
        their own.

    Raises PoolError for an impossible world size, if torchrun's environment is incomplete or
    has another world size, and for a folder that cannot be written to; BackendError for a
    backend that is unavailable.
    """
    if not (
        torchrun_environment.started_by_torchrun()
        or mpi.started_by_mpiexec()
        or torchrun_environment.started_by_hand()
    ):
        size = settings.WORLD_SIZE if world_size is None else world_size
        size = pool.check_world_size(size)
        backends.choose_backend(backend, size)
        kept = _open_folder(trace)
        if init:
            yield Ranks(size, backend, folder=kept)
        else:
            with pool.WorkerPool(size, backend, init=False) as bare:
                yield Ranks(size, backend, folder=kept, run=bare.run)
        return
    ranks = _join_others(world_size, backend, trace, init)
    try:
        ranks.agree_on_folder()
        yield ranks
    finally:
        if dist.is_initialized():
            gc.collect()  # cycles keep the group alive, and gloo may then abort at exit
            dist.destroy_process_group()


def _open_folder(trace: str | None, clear: bool = True) -> TraceFolder | None:
    """Create the folder of --trace, without the traces of an earlier start."""
    if trace is None:
        return None
    try:
        folder = TraceFolder(trace)
        if clear:
            folder.clear()
    except OSError as error:
        raise PoolError(f"--trace cannot write to {trace!r}: {error.strerror or error}") from error
    return folder


def _join_others(world_size: int | None, backend: str, trace: str | None, init: bool) -> Ranks:
    """Make this process, which a launcher has started, one of the ranks."""
    by_mpiexec = mpi.started_by_mpiexec() and not torchrun_environment.started_by_torchrun()
    launcher, option = ("mpiexec", "-n") if by_mpiexec else ("torchrun", "--nproc-per-node")
    torchrun_environment.end_with_agent()
    info = mpi.rank_info() if by_mpiexec else torchrun_environment.rank_info()
    rank, started, local_rank, local_size = info
    if world_size not in (None, started):
        raise PoolError(
            f"{launcher} has started {started} ranks, but --world-size is {world_size}; "
            f"leave out --world-size, or set {option} to it"
        )
    choice = "mpi" if by_mpiexec and backend == "auto" else backend
    chosen = backends.choose_backend(choice, local_size)
    if chosen == "mpi" and not by_mpiexec:
        raise BackendError('backend="mpi" needs ranks that mpiexec has started; use backend="gloo"')
    if chosen != "mpi" and by_mpiexec:
        raise BackendError(
            f"mpiexec has started these ranks, and they cannot use {chosen!r}; "
            "leave out --backend, or start them with torchrun"
        )
    backends.share_cores(local_size)
    backends.take_device(chosen, local_rank)
    folder = _open_folder(trace, clear=local_rank == 0)  # nobody writes before all have joined
    if by_mpiexec:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # as torchrun sets them
        os.environ.update(zip(names, map(str, info), strict=True))
        if not dist.is_mpi_available():
            mpi.load()
        join = functools.partial(_join_mpi_group, rank, started)
    else:
        name = backends.for_group(chosen) if init else "gloo"
        join = functools.partial(torchrun_environment.join_group, name)
    if init:
        join()
    return Ranks(started, backend, rank, folder, join=None if init else join)


def _join_mpi_group(rank: int, world_size: int) -> None:
    """Join the group of all ranks. Each has a store of its own: MPI has connected them already."""
    limit = timedelta(seconds=settings.JOIN_TIMEOUT)
    member = {"rank": rank, "world_size": world_size, "timeout": limit}
    dist.init_process_group(backends.for_group("mpi"), store=dist.HashStore(), **member)


def lesson_main(
    name: str, init: bool = True, **own: dict[str, Any]
) -> Callable[[Callable], Callable]:
    """Return a decorator that makes a lesson's `main` of the function that proves it.

    `main(argv)` calls the function with the ranks, and prints the line of proof, which ends with
    what it returns.

    init: as for `open_ranks`. own: the lesson's own options, as for `add_argument`, by name; the
    function is called with their values.
    """

    def decorate(prove_all: Callable[..., str]) -> Callable[[list[str] | None], None]:
        @functools.wraps(prove_all)
        def main(argv: list[str] | None = None) -> None:
            description = sys.modules[f"ddp_kit.lessons.{name}"].__doc__ or ""
            parser = _Parser(
                prog=f"python -m ddp_kit.lessons.{name}",
                description=description.split("\n\n")[0],
                epilog=f"Also: torchrun --standalone --nproc-per-node 4 -m ddp_kit.lessons.{name}",
            )
            for option, details in (_OPTIONS | own).items():
                parser.add_argument(f"--{option}", **details)
            options = vars(parser.parse_args(argv or []))
            started = [options.pop(each) for each in ("world_size", "backend", "trace")]
            with open_ranks(*started, init=init) as ranks:
                ranks.say(f"{name}: {ranks}, {prove_all(ranks, **options)}")

        return main

    return decorate


_OPTIONS: dict[str, dict[str, Any]] = {
    "world-size": {
        "type": int,
        "help": f"number of ranks to spawn (default {settings.WORLD_SIZE}; torchrun and mpiexec "
        "set their own)",
    },
    "backend": {
        "default": "auto",
        "help": '"gloo", "nccl", "cuda:gloo" (gloo on shared GPUs), "mpi", "shm", or "auto": nccl '
        "if every rank can have a GPU of its own, else gloo (default auto)",
    },
    "trace": {
        "metavar": "DIR",
        "help": "write what the ranks communicate to this folder, for kit.load_trace; this "
        "replaces the traces of an earlier start",
    },
}


class _Parser(argparse.ArgumentParser):
    """Raises PoolError in a notebook, where an exit would fill a page."""

    def error(self, message: str) -> NoReturn:
        if shell() is not None:
            raise PoolError(f"{message}; --help lists the options")
        super().error(message)


def run_as_script(main: Callable[[list[str]], None]) -> None:
    """Call a lesson's main with the command line; print an error of the kit in one line.

    Ctrl-C ends the lesson and its ranks with one line and exit status 130, as shells expect.
    In a notebook, `%run -m` would then copy the names of the lesson over those that the learner's
    cells define; it does not after a SystemExit, which it takes for success without a status.
    """
    shown_by_notebook = shell() is not None
    if shown_by_notebook:  # %run -m adds that the failure is unknown
        warnings.filterwarnings("ignore", "Unknown failure executing module")
    try:
        main(sys.argv[1:])
    except KitError as error:
        if shown_by_notebook:
            raise  # %run shows it in one line already
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt as interrupt:
        if shown_by_notebook:
            raise
        lines = getattr(interrupt, "_render_traceback_", lambda: ["KeyboardInterrupt"])
        print(*lines(), sep="\n", file=sys.stderr)
        sys.exit(130)
    if shown_by_notebook:
        sys.exit()


def brief(comparison: Comparison) -> str:
    """Return a comparison as a few words if the values are equal, else as it is."""
    small = comparison.equal and comparison.max_error < 1e-5
    return "equal up to 1e-5" if small else str(comparison)


def prove(claim: str, holds: bool | Comparison) -> None:
    """Raise ProofError naming the claim, and what `kit.compare` found, unless it holds."""
    if not holds:
        found = f"\n{holds}" if isinstance(holds, Comparison) else ""
        raise ProofError(f"this did not hold: {claim}{found}")
