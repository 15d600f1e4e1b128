"""Every exception that ddp_kit raises.

    KitError                  anything below
    ├── PoolError             a run or a pool that cannot be, as it was asked for
    ├── BackendError          a backend that cannot be had here
    ├── DataError             digits that cannot be had here
    ├── RankError             ranks raised            .failures: {rank: RankFailure}
    ├── RankDiedError         a process ended         .rank, .exitcode
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
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field


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
        line = f"\n    line {where.line} of {where.function}: {where.source}"
        return said + line.rstrip(": ")


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as words: "rank 2", "ranks 0 and 1", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


class RankError(KitError):
    """One rank or more raised; equal failures are told once.

    failures: every rank that raised, by rank.
    cell_names: what the notebook calls the files in which cells were compiled.
    """

    def __init__(self, failures: dict[int, RankFailure], cell_names: dict[str, str] | None = None):
        self.failures = dict(sorted(failures.items()))
        self.cell_names = cell_names or {}
        super().__init__(failures, cell_names)

    def _stories(self) -> list[list[RankFailure]]:
        """Failures grouped by story, in order of their lowest rank."""
        groups: dict[tuple, list[RankFailure]] = {}
        for failure in self.failures.values():
            groups.setdefault(failure.story, []).append(failure)
        return list(groups.values())

    def __str__(self) -> str:
        return "\n".join(
            f"{name_ranks(f.rank for f in group)} raised {group[0]}" for group in self._stories()
        )

    def _render_traceback_(self) -> list[str]:
        """Show the learner's own lines of each rank, instead of the kit's (IPython calls this)."""
        lines = []
        for group in self._stories():
            first = group[0]
            said = f"{first.type}: {first.message}" if first.message else first.type
            lines.append(f"{name_ranks(f.rank for f in group)} raised {said}")
            for frame in first.frames:
                if not frame.own:
                    continue
                place = self.cell_names.get(frame.file, frame.file)
                lines.append(f"  {place}, line {frame.line}, in {frame.function}")
                lines.append(textwrap.indent(frame.source, "    "))
            lines.append("")
        return [f"{type(self).__name__}:", *lines]


class RankDiedError(KitError):
    """A rank's process ended in the middle of a run.

    rank: the lowest rank that died; exitcode: as in `multiprocessing.Process.exitcode`,
    negative for a signal.
    """

    def __init__(self, rank: int, exitcode: int, others: Iterable[int] = ()):
        self.rank, self.exitcode, self.others = rank, exitcode, tuple(sorted(others))
        super().__init__(rank, exitcode, self.others)

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended the process, such as "SIGKILL"."""
        if self.exitcode >= 0:
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
            return "native code crashed"
        if self.signal:
            return "it was stopped from outside"
        return "the worker called sys.exit or os._exit"

    def __str__(self) -> str:
        how = f"ended by {self.signal}" if self.signal else f"left with exit code {self.exitcode}"
        also = f" ({name_ranks(self.others)} died too)" if self.others else ""
        return f"rank {self.rank} died: {how}{also}. Likely cause: {self.cause}."


class RunTimeoutError(KitError):
    """A run did not end within its `timeout=`; unfinished: the ranks still running."""

    def __init__(self, timeout: float, unfinished: Iterable[int]):
        self.timeout, self.unfinished = timeout, tuple(sorted(unfinished))
        super().__init__(timeout, self.unfinished)

    def __str__(self) -> str:
        return (
            f"the run did not end within {self.timeout:g} s: {name_ranks(self.unfinished)} "
            "had not returned. Raise timeout=, or look for a message that nobody sends or "
            "nobody receives."
        )
