"""Every exception that ddp_kit raises.

    KitError                  anything below
    ├── PoolError             a run or a pool that cannot be, as it was asked for
    ├── BackendError          a backend that cannot be had here
    ├── DataError             digits that cannot be had here
    ├── TraceError            a trace that cannot be loaded from files
    ├── ModelError            a cost that cannot be computed from what was given
    ├── PlotError             a picture that cannot be drawn from what was given
    ├── RankError             ranks raised            .failures: {rank: RankFailure}
    ├── RankDiedError         a process ended         .rank, .exitcode, .failures
    ├── RunTimeoutError       timeout= went by        .unfinished
    ├── DeadlockError         ranks wait for ever     .fact, .waits, .returned, .hint
    ├── MismatchError         ranks do not agree      .fact, .calls, .hint, .failures, .result
    ├── ProofError            a lesson's claim did not hold
    └── ExerciseError         an answer is not right yet  .error, .trace

    try:
        kit.run(worker)
    except kit.RankError as error:
        print(error.failures[1].type)

An error of a run also has .trace: what the ranks had communicated until then, or None.

The kit adds nothing to `str()` that changes from run to run: no pid, no temporary file, no clock.
Cell numbers do change, so they stand in the rendered traceback only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from ddp_kit.failures import (
    Call,
    RankFailure,
    Wait,
    format_calls,
    format_death,
    format_failures,
    format_returned,
    format_waits,
    signal_name,
    timeout_hint,
)

# `ddp_kit.notebook` puts a picture here, which is shown with the error.
draw_waits: Callable[[DeadlockError], object] = lambda error: None  # noqa: E731


class KitError(Exception):
    """Any error that ddp_kit raises on purpose."""

    def _lines(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]

    def _draw(self) -> None:
        """Show a picture above the error, where it has one."""

    def _render_traceback_(self) -> list[str]:
        """Show the sentence and nothing of the kit's inside (IPython calls this)."""
        self._draw()
        return self._lines()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the same where the error is a cell's value, as `_ranks` may be."""
        printer.text("\n".join(self._lines()).rstrip())


class PoolError(KitError, ValueError):
    """A pool or a run cannot be had as it was asked for."""


class BackendError(KitError, ValueError):
    """A backend is unknown, or cannot run on this machine."""


class DataError(KitError):
    """The data that was asked for is not here and cannot be fetched."""


class TraceError(KitError, ValueError):
    """A trace cannot be loaded: a rank's part is missing, or a file is no part of a trace."""


class ModelError(KitError, ValueError):
    """A cost cannot be computed from what was given."""


class PlotError(KitError, ValueError, TypeError):
    """A picture cannot be drawn from what was given: an argument's value or its type is wrong."""


class ProofError(KitError, AssertionError):
    """What a lesson claims did not hold on this machine."""


class ExerciseError(KitError, AssertionError):
    """An answer to an exercise is not right yet.

    error: the kit's own error if the run failed, such as a DeadlockError, else None. trace: the
    Trace of the run that was wrong, None where there is none.
    """

    def __init__(self, said: str, error: KitError | None = None, trace: Any = None):
        self.error, self.trace = error, trace
        super().__init__(said, error, trace)

    def __str__(self) -> str:
        return "\n".join([self.args[0], *([str(self.error)] if self.error else [])])

    def _lines(self) -> list[str]:
        """Return the sentence, and what the run's own error says, with its cells."""
        inner = self.error._lines() if self.error else []
        return [f"{type(self).__name__}: {self.args[0]}", *inner]

    def _draw(self) -> None:
        if self.error:
            self.error._draw()


class RunError(KitError):
    """A run that did not come to its end, told rank by rank.

    waits: where the ranks were that had not returned.
    cell_names: what the notebook calls the files in which cells were compiled; settable.
    trace: the Trace of what was communicated until then, None where there is none; settable.
    """

    trace: Any = None  # a Trace; its module lies above this one

    def __init__(self, waits: Iterable[Wait], cell_names: dict[str, str] | None, *args: object):
        self.waits, self.cell_names = tuple(waits), cell_names or {}
        super().__init__(*args)  # what pickle and copy build it from again

    def _told(self, cell_names: dict[str, str] | None) -> list[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self._told(None))

    def _lines(self) -> list[str]:
        """Return the learner's own lines of each rank, instead of the kit's."""
        first, *others = self._told(self.cell_names)
        return [f"{type(self).__name__}: {first}", *others]


class RankError(RunError):
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
        return format_failures(self.failures.values(), cell_names) + format_waits(
            self.waits, cell_names
        )

    def _lines(self) -> list[str]:
        return [f"{type(self).__name__}:", *self._told(self.cell_names)]


class RankDiedError(RunError):
    """A rank's process ended in the middle of a run.

    rank: the rank that died first, as far as one knows, else the lowest; exitcode: as in
    `multiprocessing.Process.exitcode`, negative for a signal, None where somebody else has
    fetched it; others: further ranks that died; failures: the ranks that raised, by rank; waits:
    where the ranks were that had not returned.
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
        return signal_name(self.exitcode)

    def _told(self, cell_names: dict[str, str] | None) -> list[str]:
        said = format_death(self.rank, self.exitcode, self.others)
        failures = format_failures(self.failures.values(), cell_names)
        return [said, *failures, *format_waits(self.waits, cell_names)]


class RunTimeoutError(RunError):
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
        said = f"the run did not end within {self.timeout:g} s."
        waits = format_waits(self.waits, cell_names)
        return [said, *waits, *format_returned(self.returned), timeout_hint(self.waits)]


class _HintedError(RunError):
    """An error that ends with a hint."""

    hint: str

    @property
    def mend(self) -> str:
        """Deprecated: use `hint`."""
        warnings.warn(_RENAMED, DeprecationWarning, stacklevel=2)
        return self.hint

    @mend.setter
    def mend(self, hint: str) -> None:
        warnings.warn(_RENAMED, DeprecationWarning, stacklevel=2)
        self.hint = hint


_RENAMED = "the attribute mend of an error is now hint"


class DeadlockError(_HintedError):
    """Ranks wait for each other, or for ranks that have returned: the run can never end.

    fact: who waits for whom, in a sentence; waits: one for each stuck rank; hint: what usually
    helps, in a sentence, settable; returned: the ranks that had returned.
    """

    def __init__(
        self,
        fact: str,
        waits: Iterable[Wait],
        hint: str,
        returned: Iterable[int] = (),
        cell_names: dict[str, str] | None = None,
    ):
        self.fact, self.hint, self.returned = fact, hint, tuple(sorted(returned))
        self._drawn = False
        waits = tuple(sorted(waits, key=lambda wait: wait.rank))
        super().__init__(waits, cell_names, fact, waits, hint, self.returned, cell_names)

    def _told(self, cell_names: dict[str, str] | None) -> list[str]:
        waits = format_waits(self.waits, cell_names)
        return [f"{self.fact}.", *waits, *format_returned(self.returned), self.hint]

    def _draw(self) -> None:
        if not self._drawn:  # a kernel asks twice
            self._drawn = True
            draw_waits(self)


class MismatchError(_HintedError):
    """Ranks called different collectives, or the two ends of a message differ.

    What one collective must have in common: the operation, shapes, dtype, op, root and split
    sizes; a send and its receive: bytes and dtype.

    fact: what differs, in a sentence; calls: what each of these ranks called, and where;
    hint: what usually helps, in a sentence; failures: what ranks raised because of it, by rank,
    settable; result: what came back if the run ended well all the same, else None, settable.
    """

    def __init__(
        self,
        fact: str,
        calls: Iterable[Call],
        hint: str,
        failures: dict[int, RankFailure] | None = None,
        cell_names: dict[str, str] | None = None,
    ):
        self.fact, self.hint, self.failures = fact, hint, dict(sorted((failures or {}).items()))
        self.calls = tuple(sorted(calls, key=lambda call: call.rank))
        self.result: Any = None
        super().__init__((), cell_names, fact, self.calls, hint, failures, cell_names)

    def _told(self, cell_names: dict[str, str] | None) -> list[str]:
        calls = format_calls(self.calls, cell_names)
        failures = format_failures(self.failures.values(), cell_names)
        return [f"{self.fact}.", *calls, *failures, self.hint]
