"""What a picture reads in a trace: the trace itself, and what did not come about in it."""

from __future__ import annotations

from typing import Any

from ddp_kit.trace import Trace
from ddp_kit.trace.events import Event

Key = tuple[int, int]  # (rank, index) of an event


def read_trace(source: Any) -> Trace:
    """Return the trace of a result or an error, or the trace that was given.

    TypeError if there is none.
    """
    trace = source if isinstance(source, Trace) else getattr(source, "trace", None)
    if not isinstance(trace, Trace):
        raise TypeError(f"needs a trace, a result or an error with a .trace, got {source!r}")
    return trace


def unmatched(trace: Trace) -> dict[Key, str]:
    """Say of sends and receives that have no other side what did not come about.

    Nothing is said where the other side may be among the events that were dropped.
    """
    dropped = trace.dropped or (0,) * trace.world_size
    taken = {(m.recv.rank, m.recv.index) for m in trace.messages() if m.recv is not None}
    never = {(m.send.rank, m.send.index): "never received" for m in trace.lost}
    for event in trace:
        key = event.rank, event.index
        if event.kind == "recv" and event.end is None and key not in taken:
            lost = any(dropped) if event.peer is None else dropped[event.peer]
            if not lost:
                never[key] = "never sent"
    return never


def absent(trace: Trace, members: dict[int, Event]) -> list[int]:
    """Return the ranks of a collective's group that did not call it, as far as one can know."""
    group = next(iter(members.values())).group
    dropped = trace.dropped or (0,) * trace.world_size
    return [rank for rank in group.ranks if rank not in members and not dropped[rank]]
