"""What the ranks of a run have reported: its result, or the error if some failed or were slow."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

from ddp_kit import settings
from ddp_kit.error_text import FrameCollector, RankFailure, Wait, is_imported
from ddp_kit.errors import (
    BackendError,
    InternalError,
    KitError,
    PoolError,
    RankDiedError,
    RankError,
    ResultError,
    RunError,
    RunTimeoutError,
)
from ddp_kit.pool import ipython
from ddp_kit.pool.ranks import RankHandle, ask_for_stacks
from ddp_kit.pool.wire.messages import KitFailed, Raised, Returned
from ddp_kit.trace import EMPTY, Snapshot, Trace
from ddp_kit.trace.stacks import read_handled


def beside_rank(rank: int, text: str) -> str:
    """Return the beginning of a value's text beside the name of its rank."""
    head, shown = f"rank {rank}: ", settings.VALUE_SHOWN
    if len(text) > shown:
        text = f"{text[:shown]} ... and {len(text) - shown:,} more characters"
    return head + textwrap.indent(text, " " * len(head)).removeprefix(" " * len(head))


def _repr(value: Any) -> str:
    """Return the repr of a value, with as much of long lists in it as `beside_rank` shows."""
    for most in (settings.VALUE_SHOWN // 3, 20, 6, 2):
        text = _shortened(value, most)
        if len(text) <= settings.VALUE_SHOWN:
            break
    return text


def _shortened(value: Any, most: int, depth: int = 0) -> str:
    """Return the repr of a value in which lists have at most about `most` items, dicts more."""
    kind = type(value)
    if kind not in (list, tuple, dict) or depth > 3:
        text = repr(value)
        is_short = depth == 0 or len(text) <= 20 * most
        return text if is_short else f"{text[: 10 * most]}...{text[-10 * most :]}"
    items = list(value.items() if kind is dict else value)
    half = 3 * most if kind is dict else most // 2
    ends = items if len(items) <= 2 * half + 1 else items[:half] + items[-half:]
    texts = [
        f"{item[0]!r}: {_shortened(item[1], most, depth + 1)}"
        if kind is dict
        else _shortened(item, most, depth + 1)
        for item in ends
    ]
    if len(ends) < len(items):
        texts.insert(half, "...")
    begin, end = {list: "[]", tuple: "()", dict: "{}"}[kind]
    comma = "," if kind is tuple and len(items) == 1 else ""
    return f"{begin}{', '.join(texts)}{comma}{end}"


@dataclass(frozen=True)
class Result:
    """What every rank of one run returned, printed and sent.

    result[2] is what rank 2 returned; `len(result)` is the world size; iterating goes in
    rank order. output[2] is what rank 2 printed, as one str. If that is more than 200,000 bytes, it
    has the first and the last 100,000, and between them a line that says how many are missing. The
    repr of a Result shortens long lists in values, and cuts what is still too long.

    Indexing raises ResultError, which is an IndexError, for a rank that does not exist.
    """

    values: tuple[Any, ...]
    output: tuple[str, ...]
    trace: Trace = field(repr=False)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rank: int) -> Any:
        try:
            return self.values[rank]
        except (IndexError, TypeError):
            ranks = "rank 0" if len(self) == 1 else f"ranks 0 to {len(self) - 1}"
            raise ResultError(
                f"there is no rank {rank!r} in this result, which has {ranks}"
            ) from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __repr__(self) -> str:
        if all(value is None for value in self.values):
            return f"{len(self)} ranks returned None"
        lines = []
        for rank, value in enumerate(self.values):
            lines.append(beside_rank(rank, _repr(value)))
        return "\n".join(lines)


# --- reports -------------------------------------------------------------------------------

_RANK_CODE = os.path.join(os.path.dirname(__file__), "rank", "")  # its frames call the worker


@dataclass
class Reports:
    """What the ranks of a run have reported, by rank, and what became of the others."""

    returned: dict[int, Returned] = field(default_factory=dict)
    raised: dict[int, Raised] = field(default_factory=dict)
    broken: dict[int, KitFailed] = field(default_factory=dict)
    died: dict[int, int | None] = field(default_factory=dict)  # exit codes
    stopped: list[Wait] = field(default_factory=list)  # where the ranks were that had to be stopped
    handled: dict[int, RankFailure] = field(default_factory=dict)  # what these were handling
    timeout: float | None = None  # seconds, once they have passed

    @property
    def failed(self) -> int:
        return len(self.raised) + len(self.died) + len(self.broken)

    @property
    def own_failures(self) -> dict[int, RankFailure]:
        """What ranks raised, except that they lost the connection to a rank that died."""
        raised = self.raised.items()
        return {n: reply.failure for n, reply in raised if not (self.died and reply.inside)}

    def locate(
        self, stuck: set[int], ranks: Sequence[RankHandle], snapshots: Sequence[Snapshot]
    ) -> None:
        """Note where the stuck ranks are, and which exceptions they are handling."""
        alive = sorted(stuck - self.died.keys())
        self.stopped = _locate([ranks[n] for n in alive], [snapshots[n] for n in alive])
        for number in alive:
            text = ranks[number].board.handled() if snapshots[number].waiting else b""
            if failure := read_handled(number, text):
                self.handled[number] = failure

    @property
    def replies(self) -> dict[int, Returned | Raised]:
        return dict(sorted((self.returned | self.raised).items()))

    @property
    def threads(self) -> dict[int, str]:
        """The threads of workers that still run, which cost their ranks a fresh process."""
        return {n: r.status.thread for n, r in self.replies.items() if r.status.thread}


class FailedRun(NamedTuple):
    """What remains of the last run that failed, besides its error.

    error: the name of the error's class. captured: what each rank of this host that raised has
    captured, b"" for nothing. failures: what ranks raised, those of other hosts included.
    """

    error: str
    captured: dict[int, bytes]
    failures: dict[int, RankFailure]


_last: list[FailedRun] = []  # at most one; the error would keep the cell's frames alive


def remember(error: BaseException, reports: Reports) -> None:
    """Keep what `%ranks debug` needs of a run that has failed, in place of an earlier one.

    In a script, the error gets a note on the files of its lines.
    """
    captured = {rank: reply.captured for rank, reply in reports.raised.items()}
    _last[:] = [FailedRun(type(error).__name__, captured, getattr(error, "failures", {}))]
    _note_files(error)


def _note_files(error: BaseException) -> None:
    """Add a note to an error that says in which files its lines are, if not all in the script.

    Python prints notes below `str(error)`. In a notebook, IPython shows the files.
    """
    can_have_notes = isinstance(error, RunError) and hasattr(error, "add_note")  # not in 3.10
    if ipython.shell() is not None or not can_have_notes:
        return
    lines = FrameCollector()
    error._format(lines)
    if any(is_imported(frame.file) for frame in lines.frames):
        places = dict.fromkeys(f"{one.function} is in {one.file}" for one in lines.frames)
        error.add_note(f"({', '.join(places)})")


def last_failed_run() -> FailedRun | None:
    """Return what remains of the last run that failed; None if none has."""
    return _last[0] if _last else None


def error_while_joining(reports: Reports, ranks: Sequence[RankHandle]) -> KitError | None:
    """Return why the ranks did not form a group; None if they did."""
    if reports.died and (why := getattr(ranks[0].process, "why_not_ready", str)()):
        return BackendError(f"the ranks ended before they were ready: {why}")
    if reports.died:
        rank = _first_death(reports, ranks)
        code = reports.died[rank]
        if code is not None and code >= 0:
            return PoolError(
                f"the process of rank {rank} ended with exit code {code} before it was ready; what "
                "it printed is above, or in the terminal where Jupyter was started"
            )
    if reports.timeout is not None:
        return PoolError(f"the ranks were not ready after {settings.START_TIMEOUT:g} s; try again")
    return error_of_ranks(reports, ranks)


def error_of_ranks(reports: Reports, ranks: Sequence[RankHandle]) -> KitError | None:
    """Return the error that says which ranks failed or were too slow; None if none was."""
    for rank, failed in sorted(reports.broken.items()):
        return InternalError(rank, failed.traceback)
    if not reports.failed and reports.timeout is None:
        return None
    names = ipython.cell_names()
    if reports.died:
        first = _first_death(reports, ranks)
        lost = [replace(r.inside, rank=n) for n, r in reports.raised.items() if r.inside]
        others = set(reports.died) - {first}
        waits = reports.stopped + lost
        code = reports.died[first]
        return RankDiedError(first, code, others, waits, reports.own_failures, names)
    if reports.raised:
        return RankError(reports.own_failures, reports.stopped, names)
    assert reports.timeout is not None
    return RunTimeoutError(reports.timeout, reports.stopped, reports.returned, names)


def _first_death(reports: Reports, ranks: Sequence[RankHandle]) -> int:
    """Return the rank that ended first; a launcher's program ends the others because of it."""
    processes = {n: ranks[n].process for n in reports.died}
    return min(reports.died, key=lambda n: (getattr(processes[n], "was_ended_later", False), n))


def _locate(ranks: Sequence[RankHandle], snapshots: Sequence[Snapshot]) -> list[Wait]:
    """Return where ranks are; those in no traced operation are asked for their stacks."""
    waits = [snapshot.as_wait() for snapshot in snapshots]
    boards = [snapshot.board for snapshot in snapshots]
    unknown = [n for n, wait in enumerate(waits) if wait.op is None and boards[n] is not EMPTY]
    found = ask_for_stacks([ranks[number] for number in unknown])
    for number, threads in zip(unknown, found, strict=True):
        main_thread = threads[0] if threads else []
        inner = takewhile(lambda frame: not frame.file.startswith(_RANK_CODE), main_thread)
        stack = tuple(frame for frame in inner if frame.own)[::-1]
        waits[number] = replace(waits[number], stack=stack)
    return waits


def rebuild(rank: int, unpack: Callable[[], Any]) -> Any:
    """Unpickle what a rank returned. Raise PoolError if the notebook cannot hold it."""
    try:
        return unpack()
    except (Exception, SystemExit) as error:
        raise PoolError(
            f"what rank {rank} returned cannot be rebuilt in the notebook: "
            f"{type(error).__name__}: {str(error).rstrip('.')}; return tensors, numbers, lists or "
            "dicts, and of a model its state_dict()"
        ) from None
