"""The marks of a timeline: bars, links, names and arrows, or shares and counts of many events."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from ddp_kit.plot.style import (
    COLLECTIVE,
    DASHES,
    INK,
    LOST,
    NO_CALL,
    PAPER,
    RECV,
    SEND,
    TIMES,
    arrow,
    bars,
    edge_color,
    set_hatch,
    write,
)
from ddp_kit.plot.timeline_lanes import Arrow, Bar, Flight, Lanes, Link

LEFT, WIDE = 0.75, 7.95  # inches: where the lanes begin on the sheet, and their greatest width
TYPE, CHARACTER = 7.5, 0.0655  # points; inches of one character
SLANT = 35  # degrees, of names that are close together
APART, GAP = 0.23, 0.08  # inches from one name to the next: between slanted ones, level ones
HALF = 0.27  # of a lane: how far a bar reaches from the middle
HEIGHT = 0.15  # inches of a label
MARKER = 4.5  # points: where a rank takes part in a collective
INSET, FIRST, LEVEL = 0.04, 0.07, 0.155  # inches: of the ends of flights, below bars, between two
CALLED = {"marker": "o", "markersize": 4, "markeredgewidth": 1.1}  # the ends of a flight
WAITED = {"marker": "D", "markersize": 4}
MOST_NAMED = 12  # ends without another end; above, they have dashes alone
LOOKS = {"send": SEND, "recv": RECV, "collective": COLLECTIVE}  # by the kind of an Event
MOST_MARKS, MOST_STEPS = 240, 48  # above, events are drawn and counted together
BINS = 60
MOST_ARROWS = 64  # in a whole picture of many events


class Labels:
    """Which places on a panel have a label, so that no other one is written there.

    scale, lane: inches of one unit of the axis, and of one lane.
    """

    def __init__(self, scale: float, lane: float) -> None:
        self.scale, self.lane = scale, lane
        self._taken: list[tuple[float, float, float, float]] = []

    def take(self, begin: float, end: float, y: float) -> bool:
        """Take the place from `begin` to `end` at height `y`; return whether it was free."""
        half = 0.5 * HEIGHT / self.lane
        box = begin, end, y - half, y + half
        if any(
            box[0] < right and left < box[1] and box[2] < below and above < box[3]
            for left, right, above, below in self._taken
        ):
            return False
        self._taken.append(box)
        return True


def _draw_lanes(ax: Axes, lanes: Lanes) -> None:
    """Draw the pale bar behind each rank's operations."""
    for rank, (begin, end) in enumerate(lanes.spans):
        bars(ax, [(begin, end - begin)], (rank - HALF, 2 * HALF), NO_CALL, "none")


# ---- one by one


def draw_each(ax: Axes, lanes: Lanes, labels: Labels) -> None:
    """Draw every bar, flight, link and arrow."""
    _draw_lanes(ax, lanes)
    groups: dict[tuple, list[Bar]] = {}
    for bar in lanes.bars:
        groups.setdefault((bar.rank, bar.kind, bool(bar.never)), []).append(bar)
    for (rank, kind, never), group in groups.items():
        ranges = [(bar.begin, bar.end - bar.begin) for bar in group]
        drawn = bars(ax, ranges, (rank - HALF, 2 * HALF), *LOOKS[kind], zorder=2)
        if never:
            drawn.set(linestyle=DASHES, edgecolor=LOST, linewidth=1.3)
    low, high = ax.get_xlim()
    crowded = len(lanes.links) * 2 * MARKER > 0.8 * 72 * labels.scale * (high - low)
    for link in lanes.links:
        _link(ax, link, crowded)
        at, ranks = zip(*link.points, strict=True)
        for rank in range(min(ranks), max(ranks) + 1):
            labels.take(min(at) - 0.05 / labels.scale, max(at) + 0.05 / labels.scale, rank)
    named = {(bar.rank, bar.never) for bar in lanes.bars if _label(ax, bar, labels)}
    _draw_flights(ax, lanes, labels)
    few = sum(bool(each.never) for each in lanes.arrows) <= MOST_NAMED
    for each in lanes.arrows:
        if each.never:
            rank = each.src if each.end is None else each.dst
            _stub(ax, each, labels, few and (rank, each.never) not in named)
        else:
            side = math.copysign(HALF, each.dst - each.src)
            ends = (each.begin, each.src + side), (each.end, each.dst - side)
            # Below the bars: it passes behind the ranks between its ends.
            arrow(ax, *ends, edge_color(each.src), zorder=1.5)


def _label(ax: Axes, bar: Bar, labels: Labels) -> bool:
    """Write the operation in its bar, if there is room; return whether it says "never"."""
    if bar.kind == "collective" and not bar.waits:
        return False  # its name is above the lanes
    names = (f"wait ({bar.op})", "wait") if bar.waits else (bar.op,)
    never = [f"{names[0]}: {bar.never}"] if bar.never else []
    for text in (*never, *names):
        length, wide = bar.end - bar.begin, (CHARACTER * len(text) + 0.06) / labels.scale
        middles = (bar.begin + share * length for share in (0.5, 0.25, 0.75))
        room = (
            middle
            for middle in middles
            if min(middle - bar.begin, bar.end - middle) >= wide / 2
            and labels.take(middle - wide / 2, middle + wide / 2, bar.rank)
        )
        if (middle := next(room, None)) is None:
            continue
        fill = LOOKS[bar.kind][0]
        paper = {"boxstyle": "square,pad=0.12", "facecolor": fill, "edgecolor": "none"}
        color = PAPER if bar.kind == "send" else INK
        style = {"color": color, "ha": "center", "bbox": paper, "zorder": 3}
        write(ax, middle, bar.rank, text, TYPE, **style)
        return text in never
    return False


def _draw_flights(ax: Axes, lanes: Lanes, labels: Labels) -> None:
    """Draw thin lines below the bars, from a call to its `wait()`; those of one time in levels."""
    inset, levels = INSET / labels.scale, flight_levels(lanes.flights, labels.lane)
    lines: dict[str, list[tuple[float, float]]] = {}  # all of a kind as one: they may be hundreds
    calls: dict[str, list[tuple[float, float]]] = {}
    waits: dict[str, list[tuple[float, float]]] = {}
    for each, level in zip(lanes.flights, levels, strict=True):
        y = each.rank + HALF + (FIRST + LEVEL * level) / labels.lane
        begin, end = each.begin + inset, each.end - inset
        if end < begin + inset:  # its wait begins at once
            end = begin + 2 * inset if each.waited else begin
        lines.setdefault(each.kind, []).extend([(begin, y), (end, y), (math.nan, math.nan)])
        if each.called:
            calls.setdefault(each.kind, []).append((begin, y))
        if each.waited:
            waits.setdefault(each.kind, []).append((end, y))
        at, wide = begin + 0.07 / labels.scale, (CHARACTER * len(each.op) + 0.06) / labels.scale
        room = each.called and each.kind != "collective" and end - at > wide
        if room and labels.take(at, at + wide, y):
            paper = {"boxstyle": "square,pad=0.05", "facecolor": PAPER, "edgecolor": "none"}
            color = LOOKS[each.kind][1]
            write(ax, at, y, each.op, TYPE, color=color, bbox=paper, zorder=3.3)
    for points, style in (
        (lines, {"linestyle": "-", "linewidth": 1.4, "solid_capstyle": "butt"}),
        (calls, {"linestyle": "", "markerfacecolor": PAPER, **CALLED}),
        (waits, {"linestyle": "", **WAITED}),
    ):
        for kind, places in points.items():
            ax.plot(*zip(*places, strict=True), color=LOOKS[kind][1], zorder=3.2, **style)


def flight_levels(flights: Sequence[Flight], lane: float) -> list[int]:
    """Return at which level below its bar each flight is drawn, from 0; lane: inches."""
    most = 1 + max(0, int(((1 - 2 * HALF) * lane - FIRST - 0.04) / LEVEL))
    over: dict[int, list[float]] = {}  # of each rank, where the last flight of each level ends
    levels = dict.fromkeys(range(len(flights)), 0)
    for i in sorted(levels, key=lambda i: (flights[i].begin, i)):
        ends = over.setdefault(flights[i].rank, [-math.inf] * most)
        begin, end = flights[i].begin, flights[i].end
        free = (level for level in range(most) if ends[level] <= begin)
        levels[i] = next(free, most - 1)
        ends[levels[i]] = max(ends[levels[i]], end, math.nextafter(begin, math.inf))
    return list(levels.values())


def _link(ax: Axes, link: Link, crowded: bool) -> None:
    color = LOOKS["collective"][1] if link.whole else LOST
    places, ranks = zip(*sorted(link.points, key=lambda point: point[1]), strict=True)
    style = {"color": color, "linewidth": 1.6, "linestyle": "-" if link.whole else DASHES}
    if crowded:
        style["linewidth"] = 0.8
    else:
        style |= {"marker": "o", "markersize": MARKER, "markerfacecolor": PAPER}
        style |= {"markeredgecolor": color, "markeredgewidth": 1.2}
    ax.plot(places, ranks, zorder=3.5, **style)


def _stub(ax: Axes, lost: Arrow, labels: Labels, named: bool) -> None:
    """Draw the end of an arrow that has no other end and, if `named`, what never happened."""
    sent, scale = lost.end is None, labels.scale
    src = lost.src if lost.src is not None else -1
    side = math.copysign(1, lost.dst - src) * (1 if sent else -1)
    rank, at = (src, lost.begin) if sent else (lost.dst, lost.end)
    near = (at, rank + HALF * side)
    far = (at + 0.14 / scale * (1 if sent else -1), rank + 0.46 * side)
    arrow(ax, *((near, far) if sent else (far, near)), LOST, linestyle=DASHES)
    if not named:
        return
    low, high = ax.get_xlim()
    room = (CHARACTER * len(lost.never) + 0.1) / scale
    left = far[0] + room > high if sent else far[0] - room >= low
    place = (near if left == sent else far)[0] + 0.05 / scale * (-1 if left else 1)
    ends = (place - room, place) if left else (place, place + room)
    if labels.take(*ends, far[1]):
        style = {"color": LOST, "ha": "right" if left else "left", "zorder": 5}
        write(ax, place, far[1], lost.never, TYPE, **style)


# ---- the names of collectives, above the lanes


@dataclass(frozen=True)
class Name:
    """What is written above one collective, or above several with the same name.

    begin, end: the places of the first and the last of them. at: the middle of the text or, if it
    is slanted, its left end. text: "" if there is no room for it.
    """

    begin: float
    end: float
    at: float
    text: str
    whole: bool


def place_names(
    links: Sequence[Link], scale: float, low: float, wide: float
) -> tuple[int, list[Name]]:
    """Return how to write the names of collectives: their slant in degrees, and each name.

    Where there is no room for each, neighbours with the same name share one, as in
    "all_reduce x 30". If the names still are too close, they are slanted.

    scale: inches of one unit of the axis; low: where the axis begins; wide: its inches.
    """
    tops = sorted(
        (min(link.points, key=lambda p: p[1])[0], link.name, link.whole) for link in links
    )
    each = [(at, at, name, whole) for at, name, whole in tops]
    shared = []
    for (name, whole), group in itertools.groupby(tops, key=lambda top: top[1:]):
        places = [at for at, *_ in group]
        text = f"{name} {TIMES} {len(places):,}" if len(places) > 1 else name
        shared.append((places[0], places[-1], text, whole))
    for slant, found in ((0, each), (0, shared), (SLANT, each), (SLANT, shared)):
        names, free = [], -math.inf
        for begin, end, text, whole in found:
            at, half = begin + (end - begin) / 2, CHARACTER * len(text) / 2 / scale
            if slant:
                first, last = at, at + APART / scale
            else:  # above the names of the ranks there is nothing else
                at = min(max(at, low - LEFT / scale + half), low + wide / scale - half)
                first, last = at - half, at + half + GAP / scale
            fits = first >= free
            names.append(Name(begin, end, at, text if fits else "", whole))
            free = last if fits else free
        if all(name.text for name in names):
            break
    return slant, names


def head_room(slant: int, names: Sequence[Name]) -> float:
    """Return how many inches the names need above the lanes."""
    longest = max((len(name.text) for name in names), default=0)
    if not longest:
        return 0.0
    room = 0.2 + CHARACTER * longest * math.sin(math.radians(slant))
    return room + 0.08 if _are_shared(names) else room


def write_names(ax: Axes, slant: int, names: Sequence[Name], lane: float) -> None:
    """Write the names above the lanes, each that is shared above a bracket; lane: inches."""
    style = {"rotation": slant, "rotation_mode": "anchor", "va": "baseline"}
    style |= {"ha": "left" if slant else "center"}
    foot, y = -0.5 - 0.02 / lane, -0.55
    top = foot - 0.06 / lane
    if _are_shared(names):
        y = top - 0.03 / lane
    for name in names:
        color = COLLECTIVE[1] if name.whole else LOST
        if name.end > name.begin and name.text:
            xs, ys = (name.begin, name.begin, name.end, name.end), (foot, top, top, foot)
            ax.plot(xs, ys, color=color, linewidth=0.9, linestyle="-", clip_on=False)
        write(ax, name.at, y, name.text, TYPE, color=color, **style)


def _are_shared(names: Sequence[Name]) -> bool:
    return any(name.end > name.begin for name in names)


# ---- shares and counts of many


def draw_shares(ax: Axes, lanes: Lanes, labels: Labels) -> None:
    """Draw each rank's shares of time in BINS parts, and arrows that stand for many messages."""
    _draw_lanes(ax, lanes)
    edges = np.linspace(*lanes.limits, BINS + 1)
    for rank, of_kinds in enumerate(shares(lanes, edges)):
        stack(ax, of_kinds, edges, rank + HALF, 2 * HALF, LOOKS)
    for src, dst, at, count, never in count_arrows(lanes):
        side = HALF if dst > src else -HALF
        color = LOST if never else edge_color(src)
        line = DASHES if never else "-"
        arrow(ax, (at, src + side), (at, dst - side), color, 0.9, linestyle=line)
        # Between two lanes, where an arrow down begins and one up ends: nothing else is there.
        text, between, ha = (f" {count:,}", src + 0.5, "left")
        if dst < src:
            text, between, ha = (f"{count:,} ", dst + 0.5, "right")
        wide = CHARACTER * len(text) / labels.scale
        if labels.take(at - wide * (ha == "right"), at + wide * (ha == "left"), between):
            write(ax, at, between, text, TYPE - 0.5, color=color, ha=ha, zorder=5)


def stack(ax: Axes, of_kinds, edges, floor: float, tall: float, looks) -> None:
    """Draw a rank's shares of time on each other, `tall` in all; looks: by kind, as LOOKS."""
    base = np.full(len(edges) - 1, floor)
    for (fill, edge, hatch), share in zip(looks.values(), of_kinds, strict=True):
        top = base - tall * share
        if share.any():
            style = {"facecolor": fill, "edgecolor": edge, "linewidth": 0, "zorder": 2}
            # One shape for all bins: sixty would take a second to draw.
            drawn = ax.stairs(top, edges, baseline=base, fill=True, **style)
            set_hatch(drawn, hatch, edge)
        base = top


def shares(lanes: Lanes, edges: np.ndarray) -> np.ndarray:
    """Return the share of each bin that each rank spends: (rank, kind, bin), kinds as in LOOKS."""
    found = np.zeros((len(lanes.spans), len(LOOKS), len(edges) - 1))
    spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bar in lanes.bars:
        spans.setdefault((bar.rank, bar.kind), []).append((bar.begin, bar.end))
    for (rank, kind), of_kind in spans.items():
        begin, end = np.array(of_kind).T
        covered = [np.clip(edge - begin, 0, end - begin).sum() for edge in edges]
        found[rank, list(LOOKS).index(kind)] = np.diff(covered) / np.diff(edges)
    return found / np.maximum(1, found.sum(axis=1, keepdims=True))


def count_pairs(lanes: Lanes) -> tuple[list[tuple[int, int, str]], int]:
    """Return (src, dst, never) of all messages, and the parts in which each pair is counted.

    There are no parts if there are too many pairs.
    """
    known = [each for each in lanes.arrows if each.src is not None]
    pairs = sorted({(each.src, each.dst, each.never) for each in known})
    return pairs, min(10, MOST_ARROWS // max(1, len(pairs)))


def count_arrows(lanes: Lanes) -> list[tuple[int, int, float, int, str]]:
    """Count messages by pair and part: (src, dst, place, count, never)."""
    pairs, parts = count_pairs(lanes)
    if not parts:
        return []
    begin, end = lanes.limits
    width = (end - begin) / parts
    counts: Counter[tuple[tuple[int, int, str], int]] = Counter()
    for each in lanes.arrows:
        at = each.begin if each.begin is not None else each.end
        if each.src is not None:
            part = min(parts - 1, int((at - begin) / width))
            counts[(each.src, each.dst, each.never), part] += 1
    # Side by side within a part: arrows at one place would cover each other.
    shift = {pair: (i + 0.5) / len(pairs) for i, pair in enumerate(pairs)}
    return [
        (*pair[:2], begin + (part + shift[pair]) * width, count, pair[2])
        for (pair, part), count in sorted(counts.items())
    ]
