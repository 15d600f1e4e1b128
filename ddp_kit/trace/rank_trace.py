"""What one rank communicated in one run, as a file: its part of the trace.

A part is lines of JSON. The first says whose it is; every other one is an event, without what
has its default value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ddp_kit.errors import TraceError
from ddp_kit.failures import Frame
from ddp_kit.trace.events import Event, Group, Trace

VERSION = 1
_MARK = b'{"format": "ddp_kit trace", '  # what every part begins with
_DEFAULTS = {f.name: f.default for f in fields(Event) if f.default is not MISSING}


class Clock(NamedTuple):
    """What to add to a host's times to have rank 0's, and how wrong that may be; nanoseconds."""

    offset: int
    error: int


@dataclass(frozen=True)
class RankTrace:
    """One rank's part of a trace; its times are those of its own host."""

    launch: str  # the same in all parts that one start of a lesson has written
    rank: int
    world_size: int
    dropped: int | None  # None: the trace does not say
    span: tuple[int, int] | None
    clock: Clock | None  # None: it is rank 0's own clock
    events: tuple[Event, ...]

    @staticmethod
    def of(trace: Trace, rank: int, launch: str, clock: Clock | None = None) -> RankTrace:
        """Return the part of `rank` in a trace."""
        dropped = trace.dropped[rank] if trace.dropped else None
        span = trace.spans[rank] if trace.spans else None
        events = tuple(event for event in trace if event.rank == rank)
        return RankTrace(launch, rank, trace.world_size, dropped, span, clock, events)

    def by_rank_0(self) -> RankTrace:
        """Return the same with times of rank 0's clock."""
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
        """Write the part, whole or not at all. Raises OSError."""
        unfinished = path.with_name(f".{path.name}.new")  # a rank that is killed leaves it
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self._lines())
        os.replace(unfinished, path)

    def _lines(self) -> Iterator[str]:
        head = {"format": "ddp_kit trace", "version": VERSION, **vars(self)}
        clock = self.clock and self.clock._asdict()
        yield json.dumps(head | {"clock": clock, "events": len(self.events)})
        for event in self.events:
            given = {k: v for k, v in vars(event).items() if v != _DEFAULTS.get(k, MISSING)}
            yield json.dumps(given, default=vars)  # a group and a line of code are objects


def join_rank_traces(parts: Sequence[RankTrace]) -> Trace:
    """Put the parts of all ranks together, by rank 0's clock. parts: in rank order."""
    shifted = [part.by_rank_0() for part in parts]
    exact = all(part.clock is None for part in parts)
    return Trace(
        parts[0].world_size,
        tuple(event for part in shifted for event in part.events),
        tuple(part.dropped for part in parts if part.dropped is not None),
        tuple(part.span for part in shifted if part.span is not None),
        () if exact else tuple(part.clock.error if part.clock else 0 for part in parts),
    )


def read_rank_trace(path: Path, rank: int) -> RankTrace:
    """Read the part of `rank`. Raises TraceError if the file is none, or cannot be read."""
    if not is_rank_trace(path):
        raise TraceError(f"{str(path)!r} is no part of a trace")
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        head = json.loads(first)
        version = head["version"]
        if version == VERSION:
            return _as_part(rank, head, tuple(_as_event(json.loads(line)) for line in lines))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{str(path)!r} is damaged; run the lesson again") from error
    raise TraceError(
        f"{str(path)!r} has version {version} of the format, and this kit reads version {VERSION}"
    )


def is_rank_trace(path: Path) -> bool:
    """Tell whether a file is a part, or the beginning of one."""
    with path.open("rb") as file:
        return _MARK.startswith(file.read(len(_MARK)))


def _as_part(rank: int, head: dict[str, Any], events: tuple[Event, ...]) -> RankTrace:
    span, clock = head["span"], head["clock"]
    if head["events"] != len(events) or {rank} != {head["rank"], *(e.rank for e in events)}:
        raise ValueError("it does not hold what it says")
    return RankTrace(
        head["launch"],
        rank,
        head["world_size"],
        head["dropped"],
        None if span is None else (span[0], span[1]),
        None if clock is None else Clock(**clock),
        events,
    )


def _as_event(values: dict[str, Any]) -> Event:
    values["group"] = Group(values["group"]["name"], tuple(values["group"]["ranks"]))
    for name in ("inputs", "outputs", "splits"):
        values[name] = tuple(map(tuple, values.get(name, ())))
    if "where" in values:
        values["where"] = Frame(**values["where"])
    return Event(**values)
