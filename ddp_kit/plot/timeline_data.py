"""What a timeline shows, as plain data: each rank's bars, arrows and links, by steps or in time.

Of a training, one of its steps; and all its numbers as text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter

from ddp_kit.error_text import name_ranks
from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import table
from ddp_kit.plot.style import TIMES, significant
from ddp_kit.trace import Trace
from ddp_kit.trace.events import Event
from ddp_kit.trace.schedule import START, WAIT, Action, Key, Schedule, schedule
from ddp_kit.trace.training_steps import TrainingStep, training_steps

LEAVES, ARRIVES = 0.06, 0.94  # of a step: where an arrow begins in a bar, and where it ends
STARTING = 0.25  # of a step: what calls that return at once take before a wait that follows


@dataclass(frozen=True)
class Bar:
    """A rank in a call that waits, or in the `wait()` for what an earlier call has started.

    kind: that of the Event. waits: it is a `wait()`. never: "never sent", or "".
    """

    rank: int
    kind: str
    begin: float
    end: float
    op: str
    never: str = ""
    waits: bool = False


@dataclass(frozen=True)
class Flight:
    """An operation under way: from a call that returned at once until it is complete.

    index and kind: those of the Event. wait: where its `wait()` was called, perhaps after the end.
    """

    rank: int
    index: int
    kind: str
    begin: float
    end: float
    op: str
    wait: float | None = None

    @property
    def last(self) -> float:
        return self.end if self.wait is None else max(self.end, self.wait)


@dataclass(frozen=True)
class Arrow:
    """A message, from the call of its send to where its receive is complete.

    send, recv: their keys, unless there is none. never: "never received", "never sent" or ""; of
    these, begin and end are the place of the side that there is. src is None for a receive from any
    source.
    """

    src: int | None
    dst: int
    begin: float
    end: float
    send: Key | None = None
    recv: Key | None = None
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

    spans: where each rank's lane begins and ends. plan: the steps of a picture without times.
    zero: the moment where the axis of a timed picture begins, in nanoseconds.
    """

    spans: Sequence[tuple[float, float]]
    bars: Sequence[Bar]
    flights: Sequence[Flight]
    arrows: Sequence[Arrow]
    links: Sequence[Link]
    plan: Schedule = field(default_factory=lambda: Schedule([], {}))
    zero: int | None = None

    @property
    def limits(self) -> tuple[float, float]:
        return min(begin for begin, _ in self.spans), max(end for _, end in self.spans)


def by_steps(trace: Trace) -> Lanes:
    """Return the order of a run: step s, from 0, is drawn from s + 0.5 to s + 1.5.

    A bar is as long as its call or wait or, if that never ended, reaches to the end of the run.
    If a rank starts something and waits for it at once, the wait begins a little later.
    """
    plan, never = schedule(trace), unmatched(trace)
    over = max(1, plan.length)
    bars: list[Bar] = []
    flights: dict[Key, Flight] = {}
    places: dict[Key, tuple[float, float]] = {}
    for own in plan.actions:
        started = -1  # where the rank came to when it last started something
        for action in own:
            event, key = action.event, (action.event.rank, action.event.index)
            begin, end = action.begin + 0.5, action.end + 0.5
            waits = action.what == WAIT
            if not waits:
                places[key] = begin + LEAVES, plan.at[key] + 0.5 + ARRIVES
            if action.what == START:
                started = action.begin
                done = over + 0.5 if event.never_ended else plan.at[key] + 1.5
                flights[key] = Flight(*key, event.kind, begin, done, short_name(event))
                continue
            if event.never_ended:
                end = over + 0.5
            if waits and end > begin and started == action.begin:
                begin += STARTING
            if waits:
                flights[key] = replace(flights[key], wait=begin)
            if end > begin:
                bars.append(_bar(event, begin, end, never, waits))
    places |= {key: (plan.at[key] + 1.0,) * 2 for key in never}
    links = [_link(trace, m, at) for m, at in _places(trace, plan)]
    spans = [(0.5, over + 0.5)] * trace.world_size
    arrows = _arrows(trace, places, never)
    return Lanes(spans, bars, list(flights.values()), arrows, links, plan)


def _places(trace: Trace, plan: Schedule) -> Iterator[tuple[dict[int, Event], list[float]]]:
    """Yield the collectives and where each of their ranks is drawn: side by side within a step."""
    steps = [[plan.at[rank, m[rank].index] for rank in m] for m in trace.collectives]
    total, seen = Counter(map(max, steps)), Counter[int]()
    for members, at in zip(trace.collectives, steps, strict=True):
        seen[max(at)] += 1
        shift = seen[max(at)] / (total[max(at)] + 1)
        yield members, [step + 0.5 + shift for step in at]


def by_time(trace: Trace) -> Lanes:
    """Return the times of a run, in milliseconds since the first rank began."""
    never = unmatched(trace)
    spans = trace.spans
    zero = min(begin for begin, _ in spans)

    def ms(moment: int) -> float:
        return (moment - zero) / 1e6

    # Who sent it may not know yet that a message has arrived.
    arrived = {(m.src, m.send.index): m.recv.end for m in trace.messages() if m.recv is not None}
    bars, flights, places = [], [], {}
    for event in trace:
        key, (_, last) = (event.rank, event.index), spans[event.rank]
        over = event.end if event.end is not None else last
        if event.waited is not None:
            begin = event.start if event.blocking else event.waited
            bars.append(_bar(event, ms(begin), ms(over), never, not event.blocking))
        taken = next(t for t in (event.end, event.waited, event.start) if t is not None)
        places[key] = ms(event.start), ms(taken)
        if not event.blocking:
            known = [end for end in (event.end, arrived.get(key)) if end is not None]
            done = min(known, default=over if event.waited is not None else event.start)
            lane = event.kind, ms(event.start), ms(max(event.start, done))
            wait = None if event.waited is None else ms(event.waited)
            flights.append(Flight(*key, *lane, short_name(event), wait))
    links = []
    for members in trace.collectives:
        came = ms(max(event.start for event in members.values()))
        links.append(_link(trace, members, [came] * len(members)))
    spans = [(ms(begin), ms(end)) for begin, end in spans]
    return Lanes(spans, bars, flights, _arrows(trace, places, never), links, zero=zero)


def part(lanes: Lanes, begin: float, end: float, zero: float = 0.0) -> Lanes:
    """Return what happened from `begin` to `end`; every place moves by `-zero`.

    Spans and bars end there; flights, arrows and links may reach beyond the picture.
    """

    def clip(at: float) -> float:
        return min(max(at, begin), end) - zero

    def happens(first: float, last: float) -> bool:
        return (first < end and last > begin) or begin <= first == last <= end

    def moved(each, **more):
        return replace(each, begin=each.begin - zero, end=each.end - zero, **more)

    bars = (bar for bar in lanes.bars if happens(bar.begin, bar.end))
    return replace(
        lanes,
        spans=[(clip(first), clip(last)) for first, last in lanes.spans],
        bars=[replace(bar, begin=clip(bar.begin), end=clip(bar.end)) for bar in bars],
        flights=[
            moved(flight, wait=None if flight.wait is None else flight.wait - zero)
            for flight in lanes.flights
            if happens(flight.begin, flight.last)
        ],
        arrows=[
            moved(arrow)
            for arrow in lanes.arrows
            if begin <= arrow.begin <= end or begin <= arrow.end <= end
        ],
        links=[
            replace(link, points=tuple((at - zero, rank) for at, rank in link.points))
            for link in lanes.links
            if begin <= min(at for at, _ in link.points) <= end
        ],
    )


def busy(lanes: Lanes) -> tuple[float, float]:
    """Return where the picture may begin and end so that long pauses do not fill most of it.

    A pause at the beginning is, say, an import in the worker, or a wait for a late rank. It is cut
    off if it is longer than what follows, and at most a fifth of what happened is before its end;
    then a small part of it stays. A pause at the end is treated in the same way.
    """
    drawn = (*lanes.bars, *lanes.flights)
    moments = sorted(moment for each in drawn for moment in (each.begin, each.end))
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


def short_name(event: Event) -> str:
    """Return the operation; in a batch, which of its calls it is."""
    in_batch = {"send": "isend", "recv": "irecv"} if event.op == "batch_isend_irecv" else {}
    return in_batch.get(event.kind, event.op)


def _bar(event: Event, begin: float, end: float, never: dict[Key, str], waits: bool) -> Bar:
    mark = never.get((event.rank, event.index), "")
    return Bar(event.rank, event.kind, begin, end, short_name(event), mark, waits)


def _arrows(trace: Trace, places: dict[Key, tuple[float, float]], never: dict[Key, str]):
    arrows = []
    for message in trace.messages():
        send, recv = message.send, message.recv
        key = send.rank, send.index
        begin = places[key][0]
        if recv is not None:
            taken = recv.rank, recv.index
            end = max(begin, places[taken][1])
            arrows.append(Arrow(send.rank, recv.rank, begin, end, key, taken))
        elif key in never:
            arrows.append(Arrow(send.rank, message.dst, begin, begin, key, never=never[key]))
    for event in trace:
        key = event.rank, event.index
        if event.kind == "recv" and key in never:
            at = places[key][0]
            arrows.append(Arrow(event.peer, event.rank, at, at, recv=key, never=never[key]))
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


# --- training steps --------------------------------------------------------------------------

FEWEST, MOST_COLLECTIVES = 3, 12  # training steps; what is easy to read without them
LASTS = "\N{HORIZONTAL ELLIPSIS}"  # in the steps after the one in which a call began


@dataclass(frozen=True)
class Training:
    """What a timeline shows of a training run of `total` steps.

    label: which step it is, or that it is what came after the last one, because the run never
    ended. name: the same in short. window: where that begins and ends.
    """

    total: int
    label: str
    name: str
    window: tuple[float, float]


def find_training(trace: Trace, lanes: Lanes, step: int | None) -> Training | None:
    """Return the training step that a timeline shows, or None if it shows every event.

    step: which one to show, from 0. None: one with the calls that most steps have; in a run that
    never ended, its end. Raises PlotError if there is no such step.
    """
    if step is None and len(trace.collectives) <= MOST_COLLECTIVES:
        return None
    steps = {rank: own for rank, own in training_steps(trace).items() if own}
    total = len(next(iter(steps.values()), ()))
    if step is not None:
        if not total:
            raise PlotError(f"step must be None, got {step!r}: no training steps were found")
        if not isinstance(step, int) or not -total <= step < total:
            raise PlotError(
                f"step must be from {-total} to {total - 1}, where 0 is the first training step; "
                f"got {step!r}"
            )
    elif total < FEWEST or not _are_worth(steps):
        return None
    over = _span(lanes, steps, total - 1)[1], lanes.limits[1]
    last = {rank: own[-1].events[-1].index for rank, own in steps.items()}
    stuck = (event for event in trace if event.never_ended)
    if step is None and over[0] < over[1] and any(e.index > last.get(e.rank, -1) for e in stuck):
        label = f"After training step {total}, the last that was completed"
        return Training(total, label, "this part", over)
    if step is None:
        calls = [tuple(_calls(own[i]) for own in steps.values()) for i in range(total)]
        usual = Counter(calls).most_common(1)[0][0]
        # The first step may have begun with what a run does only once.
        step = next((i for i in range(1, total) if calls[i] == usual), 0)
    step %= total
    label = f"Training step {step + 1:,} of {total:,}"
    return Training(total, label, "this training step", _span(lanes, steps, step))


def _are_worth(steps: dict[int, list[TrainingStep]]) -> bool:
    """Return whether a run is easier to read by its training steps."""
    first = max((own[0].events for own in steps.values()), key=len)
    ops = {event.op for event in first if event.kind == "collective"}
    # A loop of one collective has one name above all its lines, and nothing to enlarge.
    repeats = len(first) > 1 or any(op.startswith("DDP") for op in ops)
    return bool(ops) and repeats


def _calls(step: TrainingStep) -> tuple:
    return tuple((e.op, e.group, e.peer, e.tag, e.inputs, e.outputs) for e in step.events)


def _span(lanes: Lanes, steps: dict[int, list[TrainingStep]], number: int) -> tuple[float, float]:
    ranks = [own[number] for own in steps.values()]
    if lanes.zero is not None:  # when the last rank begins: steps in a row do not overlap
        begin, end = max(step.begin for step in ranks), max(step.end for step in ranks)
        return (begin - lanes.zero) / 1e6, (end - lanes.zero) / 1e6
    at = [lanes.plan.at[event.rank, event.index] for step in ranks for event in step.events]
    return min(at) + 0.5, max(at) + 1.5


# ---- as text


def step_table(title: str, trace: Trace, lanes: Lanes, window: tuple[float, float]) -> str:
    """Return what happened in a part of the order: one row per step, one column per rank."""
    never = unmatched(trace)
    without = {
        (rank, event.index): f" (without {', '.join(map(str, missing))})"
        for members in trace.collectives
        if (missing := absent(trace, members))
        for rank, event in members.items()
    }

    def name(event: Event) -> str:
        key = event.rank, event.index
        peer = "any" if event.peer is None else event.peer
        text = short_name(event)
        text += {"send": f" → {peer}", "recv": f" ← {peer}"}.get(event.kind, "")
        return text + (f" ({never[key]})" if key in never else without.get(key, ""))

    length = round(lanes.limits[1] - 0.5)
    # By step and rank: each text, and whether that began in an earlier step.
    rows: list[list[list[tuple[str, bool]]]] = [[[] for _ in lanes.spans] for _ in range(length)]
    for rank, own in enumerate(lanes.plan.actions):
        last = 0
        for action in own:
            text = "wait" if action.what == WAIT else name(action.event)
            shown = _steps(action, last, length)
            for step in shown:
                rows[step][rank].append((text, step > shown[0]))
            last = shown[-1]
    first = round(window[0] - 0.5)
    lines = [
        [str(step - first + 1), *(_cell(items, step == first) for items in rows[step])]
        for step in range(first, round(window[1] - 0.5))
    ]
    header = ["step", *(f"rank {rank}" for rank in range(trace.world_size))]
    return table(title, header, lines, align="<")


def _steps(action: Action, last: int, length: int) -> range:
    """Return the steps in which an action is shown; last: the latest with one before it."""
    begin, end = action.begin, action.end
    if action.what != START and action.event.never_ended:
        end = length
    if action.what == WAIT and end == begin:  # it ends the step that its rank has come from
        begin = max(last, begin - 1)
    return range(begin, max(end, begin + 1))


def _cell(items: list[tuple[str, bool]], is_first: bool) -> str:
    texts = [LASTS if began and not is_first else text for text, began in items]
    same = ((text, len(list(group))) for text, group in itertools.groupby(texts))
    return ", ".join(f"{text} {TIMES} {many}" if many > 1 else text for text, many in same)


def rank_table(title: str, trace: Trace, lanes: Lanes) -> str:
    counts = Counter((event.rank, event.kind) for event in trace)
    waited: Counter[int] = Counter()
    for bar in lanes.bars:
        waited[bar.rank] += round(bar.end - bar.begin - 1)  # the last one carries it out
    sent: Counter[int] = Counter()
    for message in trace.messages():
        sent[message.src] += message.nbytes
    header = ["", "sends", "bytes sent", "receives", "collectives", "steps waited"]
    rows = []
    for rank in range(trace.world_size):
        sends, recvs, collectives = (counts[rank, k] for k in ("send", "recv", "collective"))
        numbers = [sends, sent[rank], recvs, collectives, waited[rank]]
        rows.append([f"rank {rank}", *(f"{number:,}" for number in numbers)])
    return table(title, header, rows)


def time_table(title: str, lanes: Lanes) -> str:
    spent: Counter[tuple[int, str]] = Counter()
    for bar in lanes.bars:
        spent[bar.rank, bar.kind] += bar.end - bar.begin
    rows = []
    for rank, (begin, end) in enumerate(lanes.spans):
        waits = [spent[rank, kind] for kind in ("send", "recv", "collective")]
        rest = max(0.0, end - begin - sum(waits))
        rows.append([f"rank {rank}", *map(significant, (rest, *waits, end - begin))])
    header = ["", "not in a call", "in sends", "in receives", "in collectives", "all"]
    return table(f"{title} (ms)", header, rows)
