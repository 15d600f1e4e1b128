"""What ranks did in a run that failed: as plain data, and formatted as lines of text."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # where an object is in the memory of its rank


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
    notes: tuple[str, ...] = ()  # what `add_note` has added
    cause: RankFailure | None = None  # its __cause__
    context: RankFailure | None = None  # its __context__, where Python's traceback shows it
    members: tuple[RankFailure, ...] = ()  # of an ExceptionGroup

    @property
    def where(self) -> Frame | None:
        """The innermost line of the learner's own code; None if none of it is involved."""
        return next((frame for frame in reversed(self.frames) if frame.own), None)

    @property
    def key(self) -> tuple:
        """Equal for two ranks that failed in the same way at the same line."""
        where = self.where
        message = _ADDRESS.sub("", self.message)
        own = self.type, message, where and (where.file, where.line)
        linked = [one.key if one else None for one in (self.cause, self.handling, *self.members)]
        return (*own, self.notes, *linked) if self.notes or any(linked) else own

    @property
    def _of_any_rank(self) -> RankFailure:
        """The same without the number of its rank, where DDP's messages have it."""
        text = re.sub(rf"(?<=for )rank {self.rank}\b", "this rank", self.message)
        device = rf"(?<=device_ids \[){self.rank}(?=\])|(?<=output_device ){self.rank}\b"
        return replace(self, message=re.sub(device, "rank", text))

    @property
    def handling(self) -> RankFailure | None:
        """Its context, unless only a library's code was handling that."""
        return self.context if self.context and self.context.where else None

    def __str__(self) -> str:
        return "\n".join([self._exception, *([f"    {self.where}"] if self.where else [])])

    @property
    def _exception(self) -> str:
        first = f"{self.type}: {self.message}" if self.message else self.type
        return "\n".join([first, *self.notes])


@dataclass(frozen=True)
class Wait:
    """Where a rank was when its run was stopped before it had returned."""

    rank: int
    op: str | None  # as it was called: "recv(src=1)"; None: in no call that the kit knows
    where: Frame | None = None  # the line of the learner's own code
    peers: tuple[int, ...] = ()  # the ranks that it waited for, where known
    tag: int = 0
    nbytes: int | None = None  # of its tensors; None: it has none, or that is not known
    stack: tuple[Frame, ...] = ()  # what it was running, if in no call that the kit knows

    @property
    def for_key(self) -> bool:
        return (self.op or "").startswith("store.")

    @property
    def doing(self) -> str:
        """The wait in words: "waiting for rank 1 in recv(src=1), 400 bytes"."""
        whom = f" for {name_ranks(self.peers)}" if self.peers else ""
        if len(self.peers) > 1 and ("recv" in (self.op or "") or self.for_key):
            whom = f" for any of {name_ranks(self.peers)}"  # one of them is enough
        size = "" if not self.peers or self.nbytes is None else f", {count(self.nbytes, 'byte')}"
        return f"waiting{whom} in {self.op}{size}"


@dataclass(frozen=True)
class Call:
    """What a rank called, and where; the rank need not have waited in it."""

    rank: int
    op: str  # with its tensors: "all_reduce with float32 of shape (4,)"
    where: Frame | None = None  # the line of the learner's own code


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 byte", "1,200 bytes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words: "rank 2", "ranks 0 and 1", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def text_of(value: object) -> str:
    """Return `str(value)` as a plain str; a fixed text if the learner's own `__str__` fails."""
    try:
        return str.__str__(str(value))
    except BaseException:  # SystemExit would end the rank
        return "(its message could not be read)"


class TextFormatter:
    """Formats what ranks did as lines that are the same on every run.

    So it leaves out files and cells, and where ranks computed when they were stopped.
    """

    def waits(self, waits: Iterable[Wait]) -> list[str]:
        """Return lines that show where each rank waited; equal waits are merged."""
        return self.merge(
            (wait, "was " if wait.op else "", wait.doing if wait.op else "had not returned")
            for wait in waits
        )

    def calls(self, calls: Iterable[Call]) -> list[str]:
        """Return lines that show what each rank called; equal calls are merged."""
        return self.merge((call, "", f"called {call.op}") for call in calls)

    def failures(
        self, failures: Iterable[RankFailure], one: str = "raised", several: str = "raised"
    ) -> list[str]:
        """Return lines that show what ranks raised, and where; equal failures are merged.

        one, several: the verb for one rank, and for several ranks.
        """
        failures = sorted(failures, key=lambda failure: failure.rank)
        alike = Counter(failure.key for failure in failures)
        groups: dict[tuple, list[RankFailure]] = {}
        for failure in failures:
            key = failure.key if alike[failure.key] > 1 else failure._of_any_rank.key
            groups.setdefault(key, []).append(failure)
        lines = []
        for same in groups.values():
            who = name_ranks(failure.rank for failure in same)
            shown = same[0] if len({one.key for one in same}) == 1 else same[0]._of_any_rank
            lines += self._failure(f"{who} {several if len(same) > 1 else one}", shown)
        return lines

    def _failure(self, did: str, failure: RankFailure) -> list[str]:
        lines = [*f"{did} {failure._exception}".split("\n"), *self._traceback(failure)]
        for number, member in enumerate(failure.members, start=1):
            lines += [f"  {line}".rstrip() for line in self._failure(f"{number}.", member)]
        if failure.cause:
            lines += self._failure("directly caused by", failure.cause)
        if failure.handling:
            lines += self._failure("raised during handling of", failure.handling)
        return lines

    def handled(self, failures: Iterable[RankFailure]) -> list[str]:
        """Return lines that show what ranks were handling when they were stopped."""
        return self.failures(failures, "was handling", "were handling")

    def merge(self, rows: Iterable[tuple[Wait | Call, str, str]]) -> list[str]:
        """Return lines for what ranks did; equal rows are merged, and sorted by rank.

        rows: each a wait or call, the verb "was " or "", and the rest of its text.
        """
        groups: dict[tuple, list[int]] = {}
        for one, was, text in sorted(rows, key=lambda row: row[0].rank):
            stack = self._stack(getattr(one, "stack", ()))
            groups.setdefault((one.where, tuple(stack), was, text), []).append(one.rank)
        lines: list[str] = []
        following = [where for where, *_ in groups][1:]
        for (where, stack, was, text), ranks in groups.items():
            verb = "were " if was and len(ranks) > 1 else was
            lines += [f"{name_ranks(ranks)} {verb}{text}", *stack]
            # A line of code that several rows share is shown once, below the last of them.
            after = following.pop(0) if following else None
            if where is not None and where != after:
                lines += self._frame(where)
        return lines

    def _frame(self, frame: Frame) -> list[str]:
        return [f"    {frame}"]

    def _stack(self, frames: Iterable[Frame]) -> list[str]:
        return []

    def _traceback(self, failure: RankFailure) -> list[str]:
        return self._frame(failure.where) if failure.where else []


class TracebackFormatter(TextFormatter):
    """Formats what ranks did with files or cells, as a traceback does.

    cell_names: the notebook's name of each file in which a cell was compiled: "Cell In[7]".
    """

    def __init__(self, cell_names: Mapping[str, str]) -> None:
        self._cell_names = cell_names

    def _frame(self, frame: Frame) -> list[str]:
        file = self._cell_names.get(frame.file, frame.file)
        line = f"  {file}, line {frame.line}, in {frame.function}"
        return [line, textwrap.indent(frame.source, "    ")]

    def _stack(self, frames: Iterable[Frame]) -> list[str]:
        return [line for frame in frames for line in self._frame(frame)]

    def _traceback(self, failure: RankFailure) -> list[str]:
        lines = []
        for frame, same in itertools.groupby(frame for frame in failure.frames if frame.own):
            lines += self._frame(frame)
            if again := len(list(same)) - 1:
                lines.append(f"    ... repeated {again:,} more times")
        return [*lines, ""]


class FrameCollector(TextFormatter):
    """Formats nothing, but collects the lines of code that are shown."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def _frame(self, frame: Frame) -> list[str]:
        self.frames.append(frame)
        return []


class _NoticeFormatter(TextFormatter):
    """Names a file as well, if it is neither a cell's nor the script that runs."""

    def _frame(self, frame: Frame) -> list[str]:
        if is_imported(frame.file):
            name = os.path.basename(frame.file)
            frame = replace(frame, function=f"{frame.function} in {name}")
        return super()._frame(frame)


def is_imported(file: str) -> bool:
    """Return whether a file is that of a module, and not of a cell or of the running script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return os.path.isfile(file) and not (script and os.path.samefile(file, script))
    except OSError:  # the script was removed, or its relative path is from another folder
        return True


def signal_name(exitcode: int | None) -> str | None:
    """Return the signal that ended a process; None if it exited, or that is not known.

    exitcode: as in `multiprocessing.Process.exitcode`.
    """
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def format_death(
    rank: int, exitcode: int | None, others: Sequence[int], host: int | None = None
) -> str:
    """Return a line on how a rank's process ended, and what usually ends one in this way.

    host: on which it died; None: on this one.
    """
    if host is not None:
        return f"rank {rank} died on host {host}; what torchrun printed there says how."
    name = signal_name(exitcode)
    how = f"ended by {name}" if name else f"exited with code {exitcode}"
    if name == "SIGKILL":
        cause = "it was killed from outside, most often because memory ran out"
    elif name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        cause = "native code crashed; the last lines that it printed may say why"
    elif name:
        cause = "this signal was sent to it, by the worker or from outside"
    elif exitcode is None:
        how = "its exit code was lost"
        cause = "unknown, because other code in this process collects exit codes"
    else:
        cause = "the worker called os._exit"
    also = f" ({name_ranks(others)} died too)" if others else ""
    return f"rank {rank} died: {how}{also}. Likely cause: {cause}."


_MOST_UNAWAITED = 8  # calls that are listed


def format_unawaited(waits: Iterable[Wait]) -> list[str]:
    """Return lines that name the operations that ranks started but never waited for."""
    hint = "which may still be in flight; keep what it returns and call wait()"
    listed = sorted(waits, key=lambda wait: (wait.rank, str(wait.where), wait.op))
    rows = [(wait, "", f"never waited for {wait.op}, {hint}") for wait in listed]
    more = len(rows) - _MOST_UNAWAITED
    lines = _NoticeFormatter().merge(rows[:_MOST_UNAWAITED])
    return [*lines, f"... and {more:,} more such calls"] if more > 0 else lines


def format_notes(notes: Iterable[tuple[int, str, Frame | None]]) -> list[str]:
    """Return lines for what ranks have found during a run; equal notes are merged."""
    rows = (
        (Wait(rank, None, line), "", f"found that {said}")
        for rank, said, line in dict.fromkeys(notes)  # one line may make several such models
    )
    return _NoticeFormatter().merge(rows)


def format_returned(ranks: Iterable[int]) -> list[str]:
    ranks = list(ranks)
    return [f"{name_ranks(ranks)} had returned"] if ranks else []


_ONE_TO_ONE = ("send", "recv", "isend", "irecv")  # how the names of such operations begin


def format_timeout_hint(waits: Iterable[Wait]) -> str:
    """Return what to look for if a run took too long, as far as it is known where ranks waited."""
    waits = list(waits)
    elsewhere = [wait.rank for wait in waits if not wait.op]
    if elsewhere or not waits:
        where = f" on {name_ranks(elsewhere)}" if len(elsewhere) < len(waits) else ""
        return (
            f"Look for a loop that does not end{where}, or a wait that the kit does not record, "
            "such as for a queue, a lock or a process. If the work needs longer, raise the timeout."
        )
    kinds = {
        "key" if wait.for_key else "message" if wait.op.startswith(_ONE_TO_ONE) else "collective"
        for wait in waits
        if wait.op
    }
    if kinds == {"key"}:
        return "Look for a key that no rank sets."
    if kinds == {"message"}:
        return "Look for a message that nobody sends or nobody receives."
    if kinds == {"collective"}:
        return "All ranks must call the same collectives, in the same order and with equal shapes."
    return "Look for a call that one of these ranks should have made before the one it waits in."
