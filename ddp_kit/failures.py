"""What ranks did in a run that failed: as plain data, and as lines to read."""

from __future__ import annotations

import itertools
import signal
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


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
    peers: tuple[int, ...] = ()  # whom it waited for, where that is known
    tag: int = 0
    nbytes: int | None = None  # of its tensors; None: it gave none, or that is not known
    stack: tuple[Frame, ...] = ()  # what it ran if it was in no call that the kit knows

    @property
    def doing(self) -> str:
        """Its wait in words, as in "waiting for rank 1 in recv(src=1), 400 bytes"."""
        whom = f" for {name_ranks(self.peers)}" if self.peers else ""
        if len(self.peers) > 1 and "recv" in (self.op or ""):
            whom = f" for any of {name_ranks(self.peers)}"  # a receive takes from one of them
        many = "" if not self.peers or self.nbytes is None else f", {count(self.nbytes, 'byte')}"
        return f"waiting{whom} in {self.op}{many}"


@dataclass(frozen=True)
class Call:
    """What a rank called, and where; the ranks need not have waited in it."""

    rank: int
    op: str  # with what matters of its tensors: "all_reduce with float32 of shape (4,)"
    where: Frame | None = None  # the line of the learner's own code


def count(number: int, noun: str) -> str:
    """Write a number with its noun: "1 byte", "1,200 bytes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_MOST_TOLD = 8  # calls that were never waited for
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as words: "rank 2", "ranks 0 and 1", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def format_waits(waits: Iterable[Wait], cell_names: dict[str, str] | None = None) -> list[str]:
    """Say in lines what each rank waited in; equal waits once.

    cell_names: what the notebook calls the files of its cells, to name the cell of each line;
        None leaves files out, for a text that is the same on every run.
    """
    told = []
    for wait in waits:
        were = ("was ", "were ") if wait.op else ("", "")
        told.append((wait, were, wait.doing if wait.op else "had not returned"))
    return _format_places(told, cell_names)


def signal_name(exitcode: int | None) -> str | None:
    """Name the signal that ended a process, "SIGKILL"; None if it left by itself, or nobody knows.

    exitcode: as in `multiprocessing.Process.exitcode`.
    """
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def format_death(rank: int, exitcode: int | None, others: Sequence[int]) -> str:
    """Say in a line how a rank's process ended, and what most often ends one in this way.

    exitcode: as above. others: further ranks that died.
    """
    name = signal_name(exitcode)
    how = f"ended by {name}" if name else f"left with exit code {exitcode}"
    if name == "SIGKILL":
        cause = "it was killed from outside, most often because memory ran out"
    elif name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        cause = "native code crashed; what it printed last may say why"
    elif name:
        cause = "it was stopped from outside"
    elif exitcode is None:
        how = "its exit code was lost"
        cause = "unknown, because other code here fetches the exit codes of processes"
    else:
        cause = "the worker called sys.exit or os._exit"
    also = f" ({name_ranks(others)} died too)" if others else ""
    return f"rank {rank} died: {how}{also}. Likely cause: {cause}."


def timeout_hint(waits: Iterable[Wait]) -> str:
    """Say what most often helps where a run took too long. waits: where its ranks were."""
    ops = [wait.op for wait in waits]
    if not all(ops):
        return "Look for a loop that does not end. If the work needs longer, raise the timeout."
    if all(op and op.startswith(_POINT_TO_POINT) for op in ops):
        return "Look for a message that nobody sends or nobody receives."
    return "All ranks must call the same collectives, in one order and with equal shapes."


def format_unawaited(waits: Iterable[Wait]) -> list[str]:
    """Say in lines which operations ranks never waited for. waits: what they should have."""
    words = "never waited for {}, which may not be done; keep what it returns and call wait()"
    told = sorted(waits, key=lambda wait: (wait.rank, str(wait.where), wait.op))
    places = [(wait, ("", ""), words.format(wait.op)) for wait in told[:_MOST_TOLD]]
    more = len(told) - _MOST_TOLD
    return _format_places(places, None) + [f"... and {more:,} more such calls"] * (more > 0)


def format_calls(calls: Iterable[Call], cell_names: dict[str, str] | None = None) -> list[str]:
    """Say in lines what each rank called; equal calls once. cell_names: as above."""
    return _format_places([(call, ("", ""), f"called {call.op}") for call in calls], cell_names)


def _format_places(
    told: list[tuple[Wait | Call, tuple[str, str], str]], cell_names: dict[str, str] | None
) -> list[str]:
    groups: dict[tuple, list[int]] = {}
    for one, verbs, words in sorted(told, key=lambda item: item[0].rank):
        # Where a rank computed is told in a notebook only: the line is another one every time.
        stack = getattr(one, "stack", ()) if cell_names is not None else ()
        groups.setdefault((one.where, stack, verbs, words), []).append(one.rank)
    lines: list[str] = []
    following = [where for where, *_ in groups][1:]
    for (where, stack, verbs, words), ranks in groups.items():
        after = following.pop(0) if following else None
        lines.append(f"{name_ranks(ranks)} {verbs[len(ranks) > 1]}{words}")
        if cell_names is not None:
            lines += [line for frame in stack for line in _point_at(frame, cell_names)]
        if where is None or after == where:
            continue  # one line of code, told below the last rank that stands there
        lines += [f"    {where}"] if cell_names is None else _point_at(where, cell_names)
    return lines


def format_returned(ranks: Iterable[int]) -> list[str]:
    """Say in a line which ranks had returned, if any had: nobody can wait for them."""
    ranks = list(ranks)
    return [f"{name_ranks(ranks)} had returned"] if ranks else []


def _point_at(frame: Frame, cell_names: dict[str, str]) -> list[str]:
    place = cell_names.get(frame.file, frame.file)
    said = f"  {place}, line {frame.line}, in {frame.function}"
    return [said, textwrap.indent(frame.source, "    ")]


def format_failures(
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
