"""A trace as a file for Perfetto (ui.perfetto.dev) or chrome://tracing.

The format is the "Trace Event Format" of the Chromium project, with times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ddp_kit.trace.events import Event, Message, Trace

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
    """Return when a rank ended, as far as the trace shows."""
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
    """Return the names of a rank and its threads, in the order in which they are shown."""
    titles = ["worker and its waits", *(f"operations {i}" for i in range(1, threads + 1))]
    named = [("process_name", 0, {"name": f"rank {rank}"})]
    named.append(("process_sort_index", 0, {"sort_index": rank}))
    for thread, title in enumerate(titles):
        named.append(("thread_name", thread, {"name": title}))
        named.append(("thread_sort_index", thread, {"sort_index": thread}))
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
