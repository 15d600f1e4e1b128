"""Every exception that ddp_kit raises.

    KitError                  any of the errors below
    ├── PoolError             a pool or a run is not possible as requested
    ├── BackendError          a backend is unavailable here
    ├── DataError             a data set is unavailable here
    ├── TraceError            a trace cannot be loaded, or lacks what was asked for
    ├── ResultError           a result has no such rank
    ├── ModelError            a cost cannot be computed from the given numbers
    ├── PlotError             a picture cannot be drawn from the given arguments
    ├── CompareError          two values cannot be compared
    ├── RankError             ranks raised                .failures: {rank: RankFailure}, .hint
    ├── RankDiedError         a rank's process ended      .rank, .exitcode, .failures
    ├── RunTimeoutError       a run exceeded timeout=     .unfinished
    ├── DeadlockError         ranks wait forever          .fact, .waits, .returned, .dropped, .hint,
    │                                                     .failures
    ├── MismatchError         ranks disagree              .fact, .calls, .absent, .hint, .failures,
    │                                                     .result
    ├── InternalError         a bug in ddp_kit itself     .rank, .traceback
    ├── ProofError            a claim of a lesson or a comparison does not hold
    └── ExerciseError         an answer is not right yet  .error, .trace, .hint

    try:
        kit.run(worker)
    except kit.RankError as error:
        print(error.failures[1].type)

An error of a run also has .trace: what the ranks communicated until it ended, or None; .output:
what they had printed; and .handled: the exceptions that ranks were handling while they waited.

The kit adds nothing to `str(error)` that changes from run to run: no pid, no temporary file, no
time. Cell numbers do change, so only the traceback that a notebook renders has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ddp_kit.error_hints import hint_for
from ddp_kit.error_text import (
    Call,
    RankFailure,
    TextFormatter,
    TracebackFormatter,
    Wait,
    format_death,
    format_returned,
    format_timeout_hint,
    signal_name,
)


class KitError(Exception):
    """Base class of every error that ddp_kit raises.

    output: what each rank had printed, if a run has raised it; settable.
    """

    output: tuple[str, ...] = ()

    def _lines(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]

    def _draw(self) -> None:
        """Show a picture above the error, if it has one."""

    def _render_traceback_(self) -> list[str]:
        """Return the message without the kit's own frames; IPython calls this."""
        self._draw()
        return self._lines()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the same when the error is the value of a cell, as `_ranks` may be."""
        printer.text("\n".join(self._lines()).rstrip())


class PoolError(KitError, ValueError):
    """A pool or a run is not possible as requested."""


class BackendError(KitError, ValueError):
    """A backend is unknown, or cannot run on this machine."""


class DataError(KitError):
    """The requested data is not on this machine and cannot be downloaded."""


class TraceError(KitError, ValueError):
    """A trace cannot be loaded, or does not contain what was asked for."""


class ResultError(KitError, IndexError, TypeError):
    """A result has no such rank."""


class ModelError(KitError, ValueError):
    """A cost cannot be computed from the given numbers."""


class PlotError(KitError, ValueError, TypeError):
    """A picture cannot be drawn: an argument has a wrong value or type."""


class CompareError(KitError, ValueError, TypeError):
    """Two values cannot be compared: an argument has a wrong value or type."""


class ProofError(KitError, AssertionError):
    """A lesson's claim, or the equality of two values, does not hold on this machine."""


class CourseError(KitError):
    """A command of `python -m ddp_kit.course` cannot do what it was asked to do."""


class ExerciseError(KitError, AssertionError):
    """An answer to an exercise is not right yet.

    error: the kit's own error if the run failed, such as a DeadlockError, else None. trace: the
    Trace of the wrong run, None if there is none. credit: the share of the exercise's parts that
    passed before this one failed. hint: the last lines of the message, if they say what to try,
    else ""; settable. mistake: what the answer does, for the teacher, "" if that is not known;
    settable.
    """

    hint = ""
    mistake = ""

    def __init__(
        self, message: str, error: KitError | None = None, trace: Any = None, credit: float = 0.0
    ):
        self.error, self.trace, self.credit = error, trace, credit
        super().__init__(message, error, trace, credit)

    def __str__(self) -> str:
        inner = [str(self.error)] if self.error else []
        return "\n".join([self.args[0], *inner, *self._last_lines()])

    def _lines(self) -> list[str]:
        """Return the message, the lines of the run's own error, with its cells, and the hint."""
        inner = self.error._lines() if self.error else []
        return [f"{type(self).__name__}: {self.args[0]}", *inner, *self._last_lines()]

    def _last_lines(self) -> list[str]:
        return [self.hint] if self.hint else []

    def _draw(self) -> None:
        if self.error:
            self.error._draw()


class RunError(KitError):
    """A run failed; the message describes what each rank did.

    waits: where the ranks were that had not returned.
    cell_names: the notebook's names of the files in which cells were compiled; settable.
    trace: the Trace of what was communicated until then, None if there is none; settable.
    handled: the exceptions that ranks were handling while they waited, as in a `finally`, by rank;
        settable.
    """

    trace: Any = None  # a Trace; its module lies above this one

    def __init__(self, waits: Iterable[Wait], cell_names: dict[str, str] | None, *args: object):
        self.waits, self.cell_names = tuple(waits), cell_names or {}
        self.handled: dict[int, RankFailure] = {}
        super().__init__(*args)  # pickle and copy call the constructor with these

    def _format(self, text: TextFormatter) -> list[str]:
        """Return the lines of the message. text: decides how lines of code are shown."""
        raise NotImplementedError

    def _format_waits(self, text: TextFormatter) -> list[str]:
        return text.waits(self.waits) + text.handled(self.handled.values())

    def __str__(self) -> str:
        return "\n".join(self._format(TextFormatter()))

    def _lines(self) -> list[str]:
        """Return the message with the file or cell of each line of the learner's code."""
        first, *others = self._format(TracebackFormatter(self.cell_names))
        return [f"{type(self).__name__}: {first}", *others]


class RankError(RunError):
    """One or more ranks raised; equal failures are merged in the message.

    failures: every rank that raised, by rank.
    waits: where the ranks were that had neither raised nor returned.
    cell_names: the notebook's names of the files in which cells were compiled.
    hint: what usually helps, in a sentence; "" if nothing is known; settable.
    """

    def __init__(
        self,
        failures: dict[int, RankFailure],
        waits: Iterable[Wait] = (),
        cell_names: dict[str, str] | None = None,
    ):
        self.failures = dict(sorted(failures.items()))
        texts = (
            f"{f.type}: {f.message}\n{f.where and f.where.source}" for f in self.failures.values()
        )
        self.hint = next(filter(None, map(hint_for, texts)), "")
        waits = tuple(waits)
        super().__init__(waits, cell_names, failures, waits, cell_names)

    def _format(self, text: TextFormatter) -> list[str]:
        hint = [self.hint] if self.hint else []
        return text.failures(self.failures.values()) + self._format_waits(text) + hint

    def _lines(self) -> list[str]:
        return [f"{type(self).__name__}:", *self._format(TracebackFormatter(self.cell_names))]


class RankDiedError(RunError):
    """A rank's process ended in the middle of a run.

    rank: the rank that died first, as far as is known, else the lowest. exitcode: as in
    `multiprocessing.Process.exitcode`: negative for a signal, None if other code has collected it.
    others: further ranks that died. failures: the ranks that raised, by rank. waits: where the
    ranks were that had not returned. host: on which it died, if not on this one; None: on this one.
    """

    def __init__(
        self,
        rank: int,
        exitcode: int | None,
        others: Iterable[int] = (),
        waits: Iterable[Wait] = (),
        failures: dict[int, RankFailure] | None = None,
        cell_names: dict[str, str] | None = None,
        host: int | None = None,
    ):
        self.rank, self.exitcode, self.others = rank, exitcode, tuple(sorted(others))
        self.failures, self.host, waits = failures or {}, host, tuple(waits)
        given = rank, exitcode, self.others, waits, self.failures, cell_names, host
        super().__init__(waits, cell_names, *given)

    @property
    def signal(self) -> str | None:
        """The signal that ended the process: "SIGKILL"; None if it exited, or that is not known."""
        return signal_name(self.exitcode)

    def _format(self, text: TextFormatter) -> list[str]:
        died = format_death(self.rank, self.exitcode, self.others, self.host)
        return [died, *text.failures(self.failures.values()), *self._format_waits(text)]


class RunTimeoutError(RunError):
    """A run did not end within its `timeout=`.

    waits: where each rank was that had not returned. unfinished: these ranks. returned: the others.
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

    def _format(self, text: TextFormatter) -> list[str]:
        fact = f"the run did not end within {self.timeout:g} s."
        lines = [*self._format_waits(text), *format_returned(self.returned)]
        return [fact, *lines, format_timeout_hint(self.waits)]


class InternalError(RunError, RuntimeError):
    """The kit's own code failed in a rank: a bug in ddp_kit, not in the learner's code.

    rank: where it failed. traceback: the text of the exception's traceback in that rank.
    """

    def __init__(self, rank: int, traceback: str):
        self.rank, self.traceback = rank, traceback
        super().__init__((), None, rank, traceback)

    def _format(self, text: TextFormatter) -> list[str]:
        return [
            f"ddp_kit itself failed on rank {self.rank}: this is a bug in ddp_kit.",
            "Please report it to the authors of ddp_kit, with your code and this traceback:",
            *self.traceback.rstrip("\n").split("\n"),
        ]


class DeadlockError(RunError):
    """Ranks wait for each other, or for ranks that have returned: the run can never end.

    fact: which rank waits for which, in a sentence. waits: one for each stuck rank. hint: what
    usually helps, in a sentence; settable. returned: the ranks that had returned. dropped: the
    calls whose Work was deleted before anybody had waited for it, so that messages were lost.
    failures: what ranks raised when a time limit had ended such a wait, by rank; settable.
    """

    # Shows a picture above the error; the run sets it to that of its view.
    draw_waits: Callable[[DeadlockError], object] | None = None

    def __init__(
        self,
        fact: str,
        waits: Iterable[Wait],
        hint: str,
        returned: Iterable[int] = (),
        dropped: Iterable[Wait] = (),
        failures: dict[int, RankFailure] | None = None,
    ):
        self.fact, self.hint, self.returned = fact, hint, tuple(sorted(returned))
        self.dropped = tuple(sorted(dropped, key=lambda one: (one.rank, str(one.where), one.op)))
        self.failures = dict(sorted((failures or {}).items()))
        waits = tuple(sorted(waits, key=lambda wait: wait.rank))
        super().__init__(waits, None, fact, waits, hint, self.returned, self.dropped, failures)

    def _format(self, text: TextFormatter) -> list[str]:
        shown = self._format_waits(text) + text.failures(self.failures.values())
        shown += text.merge((one, "", f"never waited for {one.op}") for one in self.dropped)
        return [f"{self.fact}.", *shown, *format_returned(self.returned), self.hint]

    def _draw(self) -> None:
        draw, self.draw_waits = self.draw_waits, None  # IPython may render an error twice
        if draw is not None:
            draw(self)


class MismatchError(RunError):
    """Ranks called different collectives, or the two ends of a message differ.

    The ranks of a collective must agree in the operation, shapes, dtype, op, root and split sizes;
    a send and its receive in the number of bytes and the dtype.

    fact: what differs, in a sentence. calls: what each of these ranks called, and where. hint: what
    usually helps, in a sentence; settable. failures: what ranks raised because of it, by rank;
    settable. result: the Result if the run ended all the same, else None; settable. absent: the
    ranks that should have made the call and never did; settable.
    """

    def __init__(
        self,
        fact: str,
        calls: Iterable[Call],
        hint: str,
        failures: dict[int, RankFailure] | None = None,
    ):
        self.fact, self.hint, self.failures = fact, hint, dict(sorted((failures or {}).items()))
        self.calls = tuple(sorted(calls, key=lambda call: call.rank))
        self.absent: tuple[int, ...] = ()
        self.result: Any = None
        super().__init__((), None, fact, self.calls, hint, failures)

    def _format(self, text: TextFormatter) -> list[str]:
        raised = text.failures(self.failures.values()) + text.handled(self.handled.values())
        return [f"{self.fact}.", *text.calls(self.calls), *raised, self.hint]
