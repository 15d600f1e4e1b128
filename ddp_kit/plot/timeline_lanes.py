"""What a timeline shows, as plain data: each rank's bars, arrows and links, by steps or in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter

from ddp_kit.error_text import name_ranks
from ddp_kit.trace import Trace
from ddp_kit.trace.events import Event
from ddp_kit.trace.logical import Key, steps


@dataclass(frozen=True)
class Bar:
    """A rank in one operation; kind: that of the Event; never: "never sent", or ""."""

    rank: int
    kind: str
    begin: float
    end: float
    op: str
    never: str = ""


@dataclass(frozen=True)
class Arrow:
    """A message, from the place of its send to that of its receive.

    never: "never received" and `end` is None, or "never sent" and `begin` is None. src is None
    for a receive from any source.
    """

    src: int | None
    dst: int
    begin: float | None
    end: float | None
    never: str = ""


@dataclass(frozen=True)
class Link:
    """A collective: (place, rank) of every rank that called it; whole: every rank did."""

    name: str
    points: tuple[tuple[float, int], ...]
    whole: bool


@dataclass(frozen=True)
class Lanes:
    """All that a timeline shows.

    spans: where each rank's lane begins and ends. steps: the step of each event, without times.
    zero: the moment where the axis of a timed picture begins, in nanoseconds.
    """

    spans: Sequence[tuple[float, float]]
    bars: Sequence[Bar]
    arrows: Sequence[Arrow]
    links: Sequence[Link]
    steps: Mapping[Key, int] = field(default_factory=dict)
    zero: int | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """Where the picture begins and ends."""
        return min(begin for begin, _ in self.spans), max(end for _, end in self.spans)


def by_steps(trace: Trace) -> Lanes:
    """Return the order of a run: step s, from 0, is drawn from s + 0.5 to s + 1.5.

    An operation that waits is as long as all steps since its rank's last operation or, if the
    wait never ended, reaches to the end of the run.
    """
    at, never = steps(trace), unmatched(trace)
    places = {key: (step + 1.0, step + 1.0) for key, step in at.items()}
    bars, last, over = [], dict.fromkeys(range(trace.world_size), 0), max(at.values()) + 1
    for event in sorted(trace, key=lambda event: at[event.rank, event.index]):
        key = event.rank, event.index
        waits = event.kind != "send" and event.waited is not None
        begin, end = last[event.rank] if waits else at[key], at[key] + 1
        last[event.rank] = end
        if event.never_ended:
            end = over
        bars.append(_bar(event, begin + 0.5, end + 0.5, never))
    spans = [(0.5, over + 0.5)] * trace.world_size
    links = [_link(trace, m, [places[r, m[r].index][0] for r in m]) for m in trace.collectives]
    return Lanes(spans, bars, _arrows(trace, places, never), links, at)


def by_time(trace: Trace) -> Lanes:
    """Return the times of a run, in milliseconds since the first rank began."""
    never = unmatched(trace)
    spans = list(trace.spans) or _spans(trace)
    zero = min(begin for begin, _ in spans)

    def ms(moment: int) -> float:
        return (moment - zero) / 1e6

    bars, places = [], {}
    for event in trace:
        _, last = spans[event.rank]
        over = event.end if event.end is not None else last
        if event.waited is not None:
            bars.append(_bar(event, ms(event.waited), ms(over), never))
        elif event.kind == "send":
            bars.append(_bar(event, ms(event.start), ms(event.start), never))
        taken = next(t for t in (event.end, event.waited, event.start) if t is not None)
        places[event.rank, event.index] = ms(event.start), ms(taken)
    links = []
    for members in trace.collectives:
        came = ms(max(event.start for event in members.values()))
        links.append(_link(trace, members, [came] * len(members)))
    spans = [(ms(begin), ms(end)) for begin, end in spans]
    return Lanes(spans, bars, _arrows(trace, places, never), links, zero=zero)


def part(lanes: Lanes, begin: float, end: float, zero: float = 0.0) -> Lanes:
    """Return what happened from `begin` to `end`; every place moves by `-zero`."""

    def inside(at: float | None) -> bool:
        return at is not None and begin <= at <= end

    def clip(at: float) -> float:
        return min(max(at, begin), end) - zero

    def move(at: float | None) -> float | None:
        return None if at is None else at - zero

    return Lanes(
        [(clip(first), clip(last)) for first, last in lanes.spans],
        [
            replace(bar, begin=clip(bar.begin), end=clip(bar.end))
            for bar in lanes.bars
            if (bar.begin < end and bar.end > begin) or (inside(bar.begin) and inside(bar.end))
        ],
        [
            replace(arrow, begin=move(arrow.begin), end=move(arrow.end))
            for arrow in lanes.arrows
            if inside(arrow.begin) or inside(arrow.end)
        ],
        [
            replace(link, points=tuple((at - zero, rank) for at, rank in link.points))
            for link in lanes.links
            if inside(min(at for at, _ in link.points))
        ],
        lanes.steps,
        lanes.zero,
    )


def busy(lanes: Lanes) -> tuple[float, float]:
    """Return where the picture may begin and end so that long pauses do not fill most of it.

    A pause at the beginning is, say, an import in the worker, or a wait for a late rank. It is cut
    off if it is longer than what follows, and at most a fifth of what happened is before its end;
    then a small part of it stays. A pause at the end is treated in the same way.
    """
    moments = sorted(moment for bar in lanes.bars for moment in (bar.begin, bar.end))
    begin, end = lanes.limits
    mirrored = [-moment for moment in reversed(moments)]
    return _cut(moments, begin, end), -_cut(mirrored, -end, -begin)


def _cut(moments: Sequence[float], begin: float, end: float) -> float:
    """Return the end of the pauses at the beginning; `begin` if they are not worth a cut."""
    fifth = len(moments) // 5
    pauses = [b for a, b in pairwise([begin, *moments[:fifth]]) if b - a > (end - begin) / 20]
    if not pauses:
        return begin
    rest = moments[-1 - fifth] - pauses[-1]  # without a pause at the end
    return pauses[-1] - rest / 20 if pauses[-1] - begin > rest else begin


def unmatched(trace: Trace) -> dict[Key, str]:
    """Return "never received" or "never sent" for each send and receive without its other side.

    Those whose other side may be among the dropped events are left out.
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
    """Return the ranks of a collective's group that did not call it, as far as is known."""
    group = next(iter(members.values())).group
    dropped = trace.dropped or (0,) * trace.world_size
    return [rank for rank in group.ranks if rank not in members and not dropped[rank]]


def _bar(event: Event, begin: float, end: float, never: dict[Key, str]) -> Bar:
    mark = never.get((event.rank, event.index), "")
    return Bar(event.rank, event.kind, begin, end, event.op, mark)


def _arrows(trace: Trace, places: dict[Key, tuple[float, float]], never: dict[Key, str]):
    arrows = []
    for message in trace.messages():
        send, recv = message.send, message.recv
        begin = places[send.rank, send.index][0]
        if recv is not None:
            end = max(begin, places[recv.rank, recv.index][1])
            arrows.append(Arrow(send.rank, recv.rank, begin, end))
        elif (send.rank, send.index) in never:
            arrows.append(Arrow(send.rank, message.dst, begin, None, "never received"))
    for event in trace:
        key = event.rank, event.index
        if event.kind == "recv" and key in never:
            arrows.append(Arrow(event.peer, event.rank, None, places[key][0], never[key]))
    return arrows


def _link(trace: Trace, members: dict[int, Event], at: Sequence[float]) -> Link:
    missing = absent(trace, members)
    events = sorted(members.values(), key=attrgetter("rank"))
    same = len({event.method for event in events}) == 1
    name = events[0].op if same else " ≠ ".join(dict.fromkeys(event.op for event in events))
    if missing:
        who = name_ranks(missing) if len(missing) <= 3 else f"{len(missing)} ranks"
        name += f", without {who}"
    return Link(name, tuple(zip(at, members, strict=True)), same and not missing)


def _spans(trace: Trace) -> list[tuple[int, int]]:
    """Return each rank's first and last moment, for a trace without spans."""
    moments: dict[int, list[int]] = {}
    for event in trace:
        times = (event.start, event.waited, event.end)
        moments.setdefault(event.rank, []).extend(t for t in times if t is not None)
    whole = [moment for times in moments.values() for moment in times]
    of_ranks = [moments.get(rank, whole) for rank in range(trace.world_size)]
    return [(min(times), max(times)) for times in of_ranks]
