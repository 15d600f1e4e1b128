"""Every exception that ddp_kit raises.

    KitError                  anything below
    ├── PoolError             a run or a pool that cannot be, as it was asked for
    ├── BackendError          a backend that cannot be had here
    ├── DataError             digits that cannot be had here
    ├── RankError             ranks raised            .failures: {rank: RankFailure}
    ├── RankDiedError         a process ended         .rank, .exitcode, .failures
    ├── RunTimeoutError       timeout= went by        .unfinished
    └── ProofError            a lesson's claim did not hold

    try:
        kit.run(worker)
    except kit.RankError as error:
        print(error.failures[1].type)

The kit adds nothing to `str()` that changes from run to run: no pid, no temporary file, no clock.
Cell numbers do change, so they stand in the rendered traceback only.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from ddp_kit.failures import (
    RankFailure,
    Wait,
    name_ranks,
    tell_failures,
    tell_returned,
    tell_waits,
)

_POINT_TO_POINT = ("send", "recv", "isend", "irecv")


class KitError(Exception):
    """Any error that ddp_kit raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Show the sentence and nothing of the kit's inside (IPython calls this)."""
        return [f"{type(self).__name__}: {self}"]


class PoolError(KitError, ValueError):
    """A pool or a run cannot be had as it was asked for."""


class BackendError(KitError, ValueError):
    """A backend is unknown, or cannot run on this machine."""


class DataError(KitError):
    """The data that was asked for is not here and cannot be fetched."""


class ProofError(KitError, AssertionError):
    """What a lesson claims did not hold on this machine."""


class _RunError(KitError):
    """A run that did not come to its end, told rank by rank.

    waits: where the ranks were that had not returned.
    cell_names: what the notebook calls the files in which cells were compiled.
    """

    def __init__(self, waits: Iterable[Wait], cell_names: dict[str, str] | None, *args: object):
        self.waits, self.cell_names = tuple(waits), cell_names or {}
        super().__init__(*args)  # what pickle and copy build it from again

    def _told(self, cell_names: dict[str, str] | None) -> list[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self._told(None))

    def _render_traceback_(self) -> list[str]:
        """Show the learner's own lines of each rank, instead of the kit's (IPython calls this)."""
        first, *others = self._told(self.cell_names)
        return [f"{type(self).__name__}: {first}", *others]


class RankError(_RunError):
    """One rank or more raised; equal failures are told once.

    failures: every rank that raised, by rank.
    waits: where the others were that had not returned.
    cell_names: what the notebook calls the files in which cells were compiled.
    """

    def __init__(
        self,
        failures: dict[int, RankFailure],
        waits: Iterable[Wait] = (),
        cell_names: dict[str, str] | None = None,
    ):
        self.failures = dict(sorted(failures.items()))
        waits = tuple(waits)
        super().__init__(waits, cell_names, failures, waits, cell_names)

    def _told(self, cell_names: dict[str, str] | None) -> list[str]:
        return tell_failures(self.failures.values(), cell_names) + tell_waits(
            self.waits, cell_names
        )

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}:", *self._told(self.cell_names)]


class RankDiedError(_RunError):
    """A rank's process ended in the middle of a run.

    rank: the lowest rank that died; exitcode: as in `multiprocessing.Process.exitcode`,
    negative for a signal, None where somebody else has fetched it; others: further ranks that
    died; failures: the ranks that raised, by rank; waits: where the ranks were that had not
    returned.
    """

    def __init__(
        self,
        rank: int,
        exitcode: int | None,
        others: Iterable[int] = (),
        waits: Iterable[Wait] = (),
        failures: dict[int, RankFailure] | None = None,
        cell_names: dict[str, str] | None = None,
    ):
        self.rank, self.exitcode, self.others = rank, exitcode, tuple(sorted(others))
        self.failures, waits = failures or {}, tuple(waits)
        super().__init__(
            waits, cell_names, rank, exitcode, self.others, waits, self.failures, cell_names
        )

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended the process, such as "SIGKILL"."""
        if self.exitcode is None or self.exitcode >= 0:
            return None
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return f"signal {-self.exitcode}"

    @property
    def cause(self) -> str:
        """What most often ends a process in this way."""
        if self.signal == "SIGKILL":
            return "it was killed from outside, most often because memory ran out"
        if self.signal in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
            return "native code crashed; what it printed last may say why"
        if self.signal:
            return "it was stopped from outside"
        if self.exitcode is None:
            return "unknown, because other code here fetches the exit codes of processes"
        return "the worker called sys.exit or os._exit"

    def _told(self, cell_names: dict[str, str] | None) -> list[str]:
        how = f"left with exit code {self.exitcode}"
        if self.signal or self.exitcode is None:
            how = f"ended by {self.signal}" if self.signal else "its exit code was lost"
        also = f" ({name_ranks(self.others)} died too)" if self.others else ""
        said = f"rank {self.rank} died: {how}{also}. Likely cause: {self.cause}."
        failures = tell_failures(self.failures.values(), cell_names)
        return [said, *failures, *tell_waits(self.waits, cell_names)]


class RunTimeoutError(_RunError):
    """A run did not end within its `timeout=`.

    waits: where each rank was that had not returned; unfinished: the numbers of these ranks;
    returned: the numbers of the others.
    """

    def __init__(
        self,
        timeout: float,
        waits: Iterable[Wait],
        returned: Iterable[int] = (),
        cell_names: dict[str, str] | None = None,
    ):
        self.timeout, waits, self.returned = timeout, tuple(waits), tuple(sorted(returned))
        super().__init__(waits, cell_names, timeout, waits, self.returned, cell_names)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The ranks that had not returned."""
        return tuple(sorted(wait.rank for wait in self.waits))

    def _told(self, cell_names: dict[str, str] | None) -> list[str]:
        ops = [wait.op for wait in self.waits]
        if not all(ops):
            advice = "Raise timeout= if the work needs longer."
        elif all(op and op.startswith(_POINT_TO_POINT) for op in ops):
            advice = "Look for a message that nobody sends or nobody receives."
        else:
            advice = "All ranks must call the same collectives, in one order and with equal shapes."
        said = f"the run did not end within {self.timeout:g} s."
        waits = tell_waits(self.waits, cell_names)
        return [said, *waits, *tell_returned(self.returned), advice]
