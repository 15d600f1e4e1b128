"""Traces as files: those of `--trace`, and one for Perfetto.

`--trace` makes a folder for each run of a lesson, with a file for each rank:

    traces/run-00-blocking/rank-0.jsonl
    traces/run-00-blocking/rank-1.jsonl
    traces/run-01-immediate/rank-0.jsonl
    ...

A file is a rank trace: lines of JSON. The first says which rank it is from; each other line is an
event, without the fields that have their default value.

`Trace.to_chrome` writes the "Trace Event Format" of the Chromium project, with times in
microseconds, which ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ddp_kit.error_text import Frame, name_ranks
from ddp_kit.errors import TraceError
from ddp_kit.trace.events import Event, Group, Message, Trace

_FORMAT = "ddp_kit trace 2"
_DEFAULTS = {f.name: f.default for f in fields(Event) if f.default is not MISSING}
_RUN = re.compile(r"run-(\d+)-(\w+)")
_FILE = re.compile(r"rank-(\d+)\.jsonl")
_OURS = re.compile(r"rank-\d+\.jsonl|\.rank-\d+\.jsonl\.new")  # complete, or of a killed rank


class Clock(NamedTuple):
    """What to add to a host's times to get rank 0's, and how wrong that may be; nanoseconds."""

    offset: int
    error: int


@dataclass(frozen=True)
class RankTrace:
    """What one rank communicated in one run; its times are those of its own host."""

    rank: int
    world_size: int
    dropped: int | None  # None: not known
    span: tuple[int, int] | None
    clock: Clock | None  # None: it is rank 0's own clock
    events: tuple[Event, ...]

    @staticmethod
    def of(trace: Trace, rank: int, clock: Clock | None = None) -> RankTrace:
        dropped = trace.dropped[rank] if trace.dropped else None
        span = trace.spans[rank] if trace.spans else None
        events = tuple(event for event in trace if event.rank == rank)
        return RankTrace(rank, trace.world_size, dropped, span, clock, events)

    def by_rank_0(self) -> RankTrace:
        """Return the same with the times of rank 0's clock."""
        if self.clock is None:
            return self
        times = ("start", "waited", "end")
        events = tuple(
            replace(event, **{name: self._shift(getattr(event, name)) for name in times})
            for event in self.events
        )
        span = self.span and (self._shift(self.span[0]), self._shift(self.span[1]))
        return replace(self, events=events, span=span)

    def _shift(self, moment: Any) -> Any:
        return moment + self.clock.offset if moment and self.clock else moment  # 0: there is none

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all. Raises OSError."""
        unfinished = path.with_name(f".{path.name}.new")  # a rank that is killed leaves it
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self._lines())
        os.replace(unfinished, path)

    def _lines(self) -> Iterator[str]:
        head = {"format": _FORMAT, **vars(self)}
        clock = self.clock and self.clock._asdict()
        yield json.dumps(head | {"clock": clock, "events": len(self.events)})
        for event in self.events:
            given = {k: v for k, v in vars(event).items() if v != _DEFAULTS.get(k, MISSING)}
            yield json.dumps(given, default=vars)  # a group and a line of code are objects


def join_rank_traces(traces: Sequence[RankTrace]) -> Trace:
    """Return the trace of a run, by rank 0's clock. traces: of all ranks, in rank order."""
    shifted = [trace.by_rank_0() for trace in traces]
    exact = all(trace.clock is None for trace in traces)
    return Trace(
        traces[0].world_size,
        tuple(event for trace in shifted for event in trace.events),
        tuple(trace.dropped for trace in traces if trace.dropped is not None),
        tuple(trace.span for trace in shifted if trace.span is not None),
        () if exact else tuple(trace.clock.error if trace.clock else 0 for trace in traces),
    )


class TraceFolder:
    """Where a lesson writes the trace of each of its runs.

    path: the folder; it is created if missing.
    clock: of this process, compared with that of rank 0; None: it is the same clock.

    Raises OSError if the folder cannot be created or written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.clock: Clock | None = None
        self._runs = 0
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path):
            pass  # it can be written to

    def clear(self) -> None:
        """Remove the rank traces that an earlier start wrote, and nothing else."""
        files = [file for _, _, path in _runs(self.path) for file in path.iterdir()]
        ours = [file for file in files if _OURS.fullmatch(file.name)]
        for file in ours:
            file.unlink(missing_ok=True)  # another host that shares the folder may be faster
        for path in {file.parent for file in ours}:
            with suppress(OSError):  # it contains something else
                path.rmdir()

    def write(self, worker: str, trace: Trace, ranks: Iterable[int]) -> None:
        """Write what `ranks` communicated in the next run, of `worker`. Raises OSError."""
        name = re.sub(r"\W", "", worker) or "worker"  # a file's name cannot contain "<lambda>"
        path = self.path / f"run-{self._runs:02}-{name}"
        self._runs += 1
        path.mkdir(exist_ok=True)
        for rank in ranks:
            RankTrace.of(trace, rank, self.clock).write(path / f"rank-{rank}.jsonl")


def load_trace(folder: str | os.PathLike[str], run: int | str = -1) -> Trace:
    """Return the trace of a run that a lesson wrote with `--trace folder`.

    folder: as given to the lesson. If hosts do not share it, copy their files into one first.
    run: which run of the lesson: a number as in the name of its folder, from 0; or from the
        end, as in a list; or a worker's name, for the last run of it. By default the last run.

    All times are those of rank 0's clock; `clock_error` of the trace is how far they may be off.
    Raises TraceError if there is no such run, if the file of a rank is missing, and for a file
    that is not a rank trace.
    """
    try:
        path = _choose_run(Path(folder), run)
        traces = [_read(file, rank) for rank, file in sorted(_files(path).items())]
    except OSError as error:
        raise TraceError(f"cannot read {error.filename!r}: {error.strerror}") from error
    if missing := set(range(traces[0].world_size)).difference(trace.rank for trace in traces):
        verb = "trace is" if len(missing) == 1 else "traces are"
        raise TraceError(
            f"{name_ranks(missing)}: the {verb} missing in {str(path)!r}; a rank that was killed "
            "has written none, and one on another host may have written it there"
        )
    return join_rank_traces(traces)


def _runs(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield the number, the worker's name and the folder of each run, in no particular order."""
    for path in folder.iterdir():
        match = _RUN.fullmatch(path.name)
        if match and path.is_dir():
            yield int(match[1]), match[2], path


def _files(path: Path) -> dict[int, Path]:
    found = ((_FILE.fullmatch(file.name), file) for file in path.iterdir())
    return {int(match[1]): file for match, file in found if match}


def _choose_run(folder: Path, run: int | str) -> Path:
    if not folder.is_dir():
        raise TraceError(
            f"there is no folder {str(folder)!r}; name the one that a lesson wrote with --trace"
        )
    runs = sorted(found for found in _runs(folder) if _files(found[2]))
    if not runs:
        raise TraceError(f"there is no trace in {str(folder)!r}; a lesson writes one with --trace")
    if isinstance(run, int) and -len(runs) <= run < 0:
        return runs[run][2]
    if chosen := [path for number, worker, path in runs if run in (number, worker)]:
        return chosen[-1]
    names = ", ".join(f"{number} {worker}" for number, worker, _ in runs)
    raise TraceError(f"there is no run {run!r} in {str(folder)!r}; it has {len(runs)}: {names}")


def _read(path: Path, rank: int) -> RankTrace:
    """Read the trace of `rank`. Raises TraceError if the file is none, or is damaged."""
    try:
        head, *events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if head.pop("format") == _FORMAT:
            return _as_rank_trace(rank, head, tuple(map(_as_event, events)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{str(path)!r} is damaged; run the lesson again") from error
    raise TraceError(f"{str(path)!r} is not a rank trace that this kit can read")


def _as_rank_trace(rank: int, head: dict[str, Any], events: tuple[Event, ...]) -> RankTrace:
    span, clock = head["span"], head["clock"]
    if head["events"] != len(events) or {rank} != {head["rank"], *(e.rank for e in events)}:
        raise ValueError("the first line contradicts the others")
    read = {"span": span and tuple(span), "clock": clock and Clock(**clock), "events": events}
    return RankTrace(**head | read)


def _as_event(values: dict[str, Any]) -> Event:
    values["group"] = Group(values["group"]["name"], tuple(values["group"]["ranks"]))
    for name in ("inputs", "outputs", "splits"):
        values[name] = tuple(map(tuple, values.get(name, ())))
    values["strides"] = tuple(values.get("strides", ()))
    if "where" in values:
        values["where"] = Frame(**values["where"])
    return Event(**values)


# --- for Perfetto ----------------------------------------------------------------------------

SHORTEST = 1  # nanoseconds; an arrow can only be attached to a slice that lasts
Slice = tuple[int, int, int]  # thread, begin and end in nanoseconds


def write_chrome(trace: Trace, path: str | PathLike[str]) -> None:
    """Write a trace as JSON in Chrome's trace event format.

    A rank is a process. Its first thread is the worker with its waits; the others hold its
    operations, from the call to the end of the wait, on several threads where they overlap. An
    arrow leads from each send to the receive that took it. Times are microseconds since the
    first rank began. Raises OSError if the file cannot be written.
    """
    moments = [begin for begin, _ in trace.spans] + [event.start for event in trace]
    zero = min(moments, default=0)
    named: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    slices: dict[tuple[int, int], Slice] = {}
    events: dict[int, list[Event]] = {rank: [] for rank in range(trace.world_size)}
    for event in trace:
        events[event.rank].append(event)
    for rank, own in events.items():
        span = trace.spans[rank] if rank < len(trace.spans) else None
        laid = _lay(own, _over(own, span))
        slices |= {(rank, index): place for index, place in laid.items()}
        named += _names(rank, max((thread for thread, _, _ in laid.values()), default=0))
        if span is not None:
            found.append(_complete("worker", rank, 0, *span, zero))
        for event in own:
            thread, begin, end = laid[event.index]
            args = _args(event)
            if event.waited is not None:
                wait = (event.waited, max(end, event.waited))
                found.append(_complete(f"wait for {event.op}", rank, 0, *wait, zero, args))
            found.append(_complete(event.op, rank, thread, begin, end, zero, args))
    for number, message in enumerate(trace.messages()):
        found += _arrow(number, message, slices, zero)
    found.sort(key=lambda event: event["ts"])
    whole = {"displayTimeUnit": "ms", "traceEvents": named + found}
    Path(path).write_text(json.dumps(whole), encoding="utf-8")


def _over(events: Sequence[Event], span: tuple[int, int] | None) -> int:
    moments = [t for e in events for t in (e.start, e.waited, e.end) if t is not None]
    return max([*moments, span[1]] if span else moments, default=0)


def _lay(events: Sequence[Event], over: int) -> dict[int, Slice]:
    """Assign each operation to a thread that has no other one at the same time: {index: slice}.

    An operation whose wait never ended lasts as long as its rank; one that nobody waited for is
    an instant.
    """
    laid: dict[int, Slice] = {}
    free_at: list[int] = []  # when the last operation of each thread ends
    for event in sorted(events, key=lambda event: (event.start, event.index)):
        end = event.end
        if end is None:
            end = event.start if event.waited is None else over
        end = max(end, event.start + SHORTEST)
        free = (thread for thread, at in enumerate(free_at) if at <= event.start)
        thread = next(free, len(free_at))
        free_at[thread : thread + 1] = [end]
        laid[event.index] = thread + 1, event.start, end  # the worker is thread 0
    return laid


def _names(rank: int, threads: int) -> list[dict[str, Any]]:
    titles = ["worker and its waits", *(f"operations {i}" for i in range(1, threads + 1))]
    named = [("process_name", 0, {"name": f"rank {rank}"})]
    named += [("thread_name", thread, {"name": title}) for thread, title in enumerate(titles)]
    return [{"ph": "M", "name": n, "pid": rank, "tid": t, "args": args} for n, t, args in named]


def _complete(
    name: str, rank: int, thread: int, begin: int, end: int, zero: int, args: Any = None
) -> dict[str, Any]:
    place = {"pid": rank, "tid": thread, "ts": (begin - zero) / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "name": name, "cat": "ddp_kit", **place, "args": args or {}}


def _args(event: Event) -> dict[str, Any]:
    """Return the details of an operation that Perfetto shows, without those it does not have."""
    args: dict[str, Any] = {"kind": event.kind, "group": list(event.group.ranks)}
    if event.kind == "collective":
        args |= {"sequence": event.sequence, "root": event.root, "reduce op": event.reduce_op}
    else:
        peer = "dst" if event.kind == "send" else "src"
        args |= {peer: "any" if event.peer is None else event.peer, "tag": event.tag}
    args |= {"bytes": event.nbytes, "shape": list(event.shape), "dtype": event.dtype or None}
    args["line"] = str(event.where) if event.where else None
    if event.end is None:
        args["ended"] = "never" if event.waited is not None else "nobody waited for it"
    return {key: value for key, value in args.items() if value is not None}


def _arrow(
    number: int, message: Message, slices: dict[tuple[int, int], Slice], zero: int
) -> list[dict[str, Any]]:
    """Return an arrow from a send to its receive; bp: e attaches its end to the slice around it."""
    send, recv = message.send, message.recv
    if recv is None:
        return []
    thread, begin, _ = slices[send.rank, send.index]
    into, first, last = slices[recv.rank, recv.index]
    end = max(first, last - SHORTEST)
    common = {"name": "message", "cat": "ddp_kit", "id": number}
    start = {"ph": "s", "pid": send.rank, "tid": thread, "ts": (begin - zero) / 1000}
    over = {"ph": "f", "bp": "e", "pid": recv.rank, "tid": into, "ts": (end - zero) / 1000}
    return [{**common, **start}, {**common, **over}]
