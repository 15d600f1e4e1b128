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

import itertools
import signal
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Frame:
    """One line of one rank's traceback."""

    file: str  # a path, or the name that IPython gave a cell
    line: int
    function: str
    source: str  # the line itself, stripped; "" when it cannot be read
    own: bool  # in the learner's code: not in a library, not in the kit

    def __str__(self) -> str:
        return f"line {self.line} of {self.function}: {self.source}".rstrip(": ")


@dataclass(frozen=True)
class RankFailure:
    """What one rank raised, and where."""

    rank: int
    type: str  # the exception's class name
    message: str  # str(exception)
    frames: tuple[Frame, ...] = field(default=(), repr=False)

    @property
    def where(self) -> Frame | None:
        """The innermost line of the learner's own code; None if it has no part in this."""
        return next((frame for frame in reversed(self.frames) if frame.own), None)

    @property
    def story(self) -> tuple:
        """What two ranks share when they failed in the same way at the same line."""
        where = self.where
        return self.type, self.message, where and (where.file, where.line)

    def __str__(self) -> str:
        said = f"{self.type}: {self.message}" if self.message else self.type
        where = self.where
        if where is None:
            return said
        return f"{said}\n    {where}"


@dataclass(frozen=True)
class Wait:
    """Where a rank was when its run was ended without it."""

    rank: int
    op: str | None  # as it was called: "recv(src=1)"; None: it was in no call that the kit knows
    where: Frame | None = None  # the line of the learner's own code


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as words: "rank 2", "ranks 0 and 1", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def tell_waits(waits: Iterable[Wait], cell_names: dict[str, str] | None = None) -> list[str]:
    """Say in lines what each rank waited in; equal waits once.

    cell_names: what the notebook calls the files of its cells, to name the cell of each line;
        None leaves files out, for a text that is the same on every run.
    """
    groups: dict[tuple, list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: wait.rank):
        groups.setdefault((wait.where, wait.op), []).append(wait)
    lines, told = [], list(groups.values())
    for group, following in zip(told, [*told[1:], None], strict=False):
        was = "was" if len(group) == 1 else "were"
        did = f"{was} waiting in {group[0].op}" if group[0].op else "had not returned"
        lines.append(f"{name_ranks(wait.rank for wait in group)} {did}")
        where = group[0].where
        if where is None or (following and following[0].where == where):
            continue  # one line of code, told below the last rank that stands there
        lines += [f"    {where}"] if cell_names is None else _point_at(where, cell_names)
    return lines


def tell_returned(ranks: Iterable[int]) -> list[str]:
    """Say in a line which ranks had returned, if any had: nobody can wait for them."""
    ranks = list(ranks)
    return [f"{name_ranks(ranks)} had returned"] if ranks else []


def _point_at(frame: Frame, cell_names: dict[str, str]) -> list[str]:
    place = cell_names.get(frame.file, frame.file)
    said = f"  {place}, line {frame.line}, in {frame.function}"
    return [said, textwrap.indent(frame.source, "    ")]


def tell_failures(
    failures: Iterable[RankFailure], cell_names: dict[str, str] | None = None
) -> list[str]:
    """Say in lines what ranks raised, and where; equal failures once. cell_names: as above."""
    stories: dict[tuple, list[RankFailure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        stories.setdefault(failure.story, []).append(failure)
    lines = []
    for story in stories.values():
        first, who = story[0], name_ranks(failure.rank for failure in story)
        if cell_names is None:
            lines += f"{who} raised {first}".split("\n")
            continue
        said = f"{first.type}: {first.message}" if first.message else first.type
        lines.append(f"{who} raised {said}")
        own = (frame for frame in first.frames if frame.own)
        for frame, same in itertools.groupby(own):
            lines += _point_at(frame, cell_names)
            again = len(list(same)) - 1
            if again:
                lines.append(f"    ... and {again:,} more times from there")
        lines.append("")
    return lines


class _RunError(KitError):
    """A run that did not come to its end, told rank by rank.

    waits: where the ranks were that had not returned.
    cell_names: what the notebook calls the files in which cells were compiled.
    """

    waits: tuple[Wait, ...] = ()
    cell_names: dict[str, str] = {}

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
        self.waits = tuple(waits)
        self.cell_names = cell_names or {}
        super().__init__(failures, self.waits, cell_names)

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
        self.waits = tuple(waits)
        self.failures = failures or {}
        self.cell_names = cell_names or {}
        super().__init__(rank, exitcode, self.others, self.waits, self.failures, cell_names)

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
            return (
                "unknown, because other code in the notebook waits for processes of its own accord"
            )
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
        self.timeout, self.waits, self.returned = timeout, tuple(waits), tuple(sorted(returned))
        self.cell_names = cell_names or {}
        super().__init__(timeout, self.waits, self.returned, cell_names)

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
