"""What every rank sent and waited for, in order or in time: one bar per rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from ddp_kit import settings
from ddp_kit.error_text import count
from ddp_kit.errors import PlotError
from ddp_kit.plot import picture as pictures
from ddp_kit.plot import style
from ddp_kit.plot.style import DASHES, INK, LOST, NO_CALL, PAPER, TIMES
from ddp_kit.plot.timeline_data import (
    Arrow,
    Bar,
    Flight,
    Lanes,
    Link,
    busy,
    by_steps,
    by_time,
    find_training,
    part,
    rank_table,
    step_table,
    time_table,
)
from ddp_kit.trace import Trace
from ddp_kit.trace.schedule import Key

if TYPE_CHECKING:
    from ddp_kit.notebook.timeline import TimelineWidget

# By the kind of an Event: fill, edge and hatch of a bar, and what the key says of it.
LOOKS = {"send": style.SEND, "recv": style.RECV, "collective": style.COLLECTIVE}
NAMES = {"send": "in a send", "recv": "in a receive", "collective": "in a collective"}
LEFT, WIDE = 0.75, 7.95  # inches: where the lanes begin on the sheet, and their width
TYPE, CHARACTER, HEIGHT = 7.5, 0.0655, 0.15  # points; inches: of one character, of a label
SLANT = 35  # degrees, of names that are close together
APART, GAP = 0.23, 0.08  # inches from one name to the next: between slanted ones, level ones
HALF = 0.27  # of a lane: how far a bar reaches from the middle
MARKER = 4.5  # points: where a rank takes part in a collective
INSET, FIRST, LEVEL = 0.04, 0.07, 0.155  # inches: of the ends of flights, below bars, between two
BINS = 60  # parts of the picture, of each of which a rank spends a share in calls

Place = tuple[float, float]  # on the axes of the lanes
Lines = dict[Key | None, tuple[Place, Place]]  # where flights begin and end


class Name(NamedTuple):
    """What is written above one collective, or above several with the same name.

    begin, end: the places of the first and the last of them. at: the middle of the text or, if it
    is slanted, its left end. text: "" if there is no room for it.
    """

    begin: float
    end: float
    at: float
    text: str
    whole: bool


class Panel:
    """The lanes of all ranks over one axis.

    many: there are too many events to draw them one by one. tall: inches. head: inches of the names
    of collectives, which are above the lanes.
    """

    def __init__(self, lanes: Lanes, timed: bool) -> None:
        begin, end = lanes.limits
        self.lanes, self.timed, n = lanes, timed, len(lanes.spans)
        self.length = 1.003 * ((end - begin) or 1)
        self.scale = WIDE / self.length  # inches of one unit of the axis
        drawn = 2 * len(lanes.arrows) + len(lanes.links)
        long = not timed and end - begin > settings.TIMELINE_STEPS and bool(lanes.arrows)
        self.many = drawn > settings.TIMELINE_MARKS or long
        self.flights = [] if self.many else lanes.flights
        most = 0.78 if self.flights else 0.62
        self.lane = max(0.36, min(most, 6.8 * most / n))  # inches
        self.below = 0.12 if self.flights else 0.0  # inches for the lowest flight
        self.tall = n * self.lane + self.below
        links = [] if self.many else lanes.links
        self.slant, self.names = place_names(links, self.scale, begin)
        self.shared = any(name.end > name.begin for name in self.names)
        longest = max((len(name.text) for name in self.names), default=0)
        rises = CHARACTER * longest * math.sin(math.radians(self.slant))
        self.head = 0.28 + rises if longest else 0.0
        self._labels: list[Bbox] = []

    def draw(self, picture: pictures.Picture, sheet: Axes, top: float, xlabel: str) -> None:
        """Draw the lanes, `top` inches below the top of the picture, with their ranks."""
        for rank in range(len(self.lanes.spans)):
            style.chip(sheet, 0, top + (rank + 0.5) * self.lane, 0.62, rank, f"rank {rank}")
        self.ax = ax = picture.chart(LEFT, top, WIDE, self.tall, "x", xlabel)
        begin, _ = self.lanes.limits
        ax.set(xlim=(begin, begin + self.length), ylim=(self.tall / self.lane - 0.5, -0.5))
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        steps = [1, 2, 5, 10]  # no ticks of 80 ms
        locator = MaxNLocator(nbins=12, steps=steps, integer=not self.timed, min_n_ticks=1)
        ax.xaxis.set_major_locator(locator)
        if not self.timed:  # lines between the steps
            ax.grid(False)
            if self.length <= settings.TIMELINE_STEPS + 1:
                for step in range(1, round(self.length)):
                    ax.axvline(begin + step, color="#ececec", linewidth=0.8, zorder=0.5)
        _draw_spans(ax, self.lanes)
        if self.many:
            _draw_shares(ax, self.lanes)
        else:
            self._draw_each()
        self._write_names()

    def _draw_each(self) -> None:
        lanes, groups = self.lanes, {}
        for bar in lanes.bars:
            groups.setdefault((bar.rank, bar.kind, bool(bar.never)), []).append(bar)
        for (rank, kind, never), group in groups.items():
            ranges = [(bar.begin, bar.end - bar.begin) for bar in group]
            drawn = style.bars(self.ax, ranges, (rank - HALF, 2 * HALF), *LOOKS[kind], zorder=2)
            if never:
                drawn.set(linestyle=DASHES, edgecolor=LOST, linewidth=1.3)
        for link in lanes.links:
            self._draw_link(link)
        for bar in lanes.bars:
            self._label(bar)
        lines = self._draw_flights()
        for each in lanes.arrows:
            if each.never:
                self._draw_lost(each, lines)
            else:
                side = math.copysign(HALF, each.dst - each.src)
                begin, _ = lines.get(each.send, ((each.begin, each.src + side), None))
                _, end = lines.get(each.recv, (None, (each.end, each.dst - side)))
                # Below the bars: it passes behind the ranks between its ends.
                style.arrow(self.ax, begin, end, style.edge_color(each.src), zorder=1.5)

    def _is_free(self, begin: float, end: float, y: float) -> bool:
        """Take a place for a label; return whether it was free."""
        half = 0.5 * HEIGHT / self.lane
        box = Bbox([[begin, y - half], [end, y + half]])
        free = not any(map(box.overlaps, self._labels))
        if free:
            self._labels.append(box)
        return free

    def _write(self, x: float, y: float, text: str, **look) -> None:
        style.write(self.ax, x, y, text, TYPE, **look)

    def _width(self, text: str) -> float:
        return (CHARACTER * len(text) + 0.06) / self.scale

    def _label(self, bar: Bar) -> None:
        """Write the operation in its bar, if there is room."""
        if bar.kind == "collective" and not bar.waits:
            return  # its name is above the lanes
        names = (f"wait ({bar.op})", "wait") if bar.waits else (bar.op,)
        for text, share in itertools.product(names, (0.5, 0.25, 0.75)):
            middle = bar.begin + share * (bar.end - bar.begin)
            begin, end = middle - self._width(text) / 2, middle + self._width(text) / 2
            if bar.begin <= begin and end <= bar.end and self._is_free(begin, end, bar.rank):
                fill = LOOKS[bar.kind][0]
                paper = {"boxstyle": "square,pad=0.12", "facecolor": fill, "edgecolor": "none"}
                color = PAPER if bar.kind == "send" else INK
                self._write(middle, bar.rank, text, color=color, ha="center", bbox=paper, zorder=3)
                return

    def _draw_flights(self) -> Lines:
        """Draw thin lines below the bars, from a call to its end; those of one time in levels.

        All of a kind are one line, because they may be hundreds. Returns the ends of each.
        """
        levels = flight_levels(self.flights, self.lane)
        lines: Lines = {}
        waits: dict[str, list[Place]] = {}
        for each, level in zip(self.flights, levels, strict=True):
            y = each.rank + HALF + (FIRST + LEVEL * level) / self.lane
            inset = INSET / self.scale
            begin, end = each.begin + inset, max(each.end - inset, each.begin + 2 * inset)
            lines[each.rank, each.index] = (begin, y), (end, y)
            label, width = begin + 0.07 / self.scale, self._width(each.op)
            if each.wait is not None:
                at = max(begin + inset, min(each.wait, each.last - inset))
                waits.setdefault(each.kind, []).append((at, y))
                if at < label + width:
                    label = at + 0.07 / self.scale
            room = each.kind != "collective" and end - label > width
            if room and self._is_free(label, label + width, y):
                paper = {"boxstyle": "square,pad=0.05", "facecolor": PAPER, "edgecolor": "none"}
                look = {"color": LOOKS[each.kind][1], "bbox": paper, "zorder": 3.3, "clip_on": True}
                self._write(label, y, each.op, **look)
        for kind in dict.fromkeys(each.kind for each in self.flights):
            look = {"color": LOOKS[kind][1], "zorder": 3.2, "markersize": 4}
            own = [lines[each.rank, each.index] for each in self.flights if each.kind == kind]
            points = [point for begin, end in own for point in (begin, end, (math.nan, math.nan))]
            xs, ys = zip(*points, strict=True)
            self.ax.plot(xs, ys, linestyle="-", linewidth=1.4, solid_capstyle="butt", **look)
            rim = {"markerfacecolor": PAPER, "markeredgewidth": 1.1}
            self.ax.plot(xs[::3], ys[::3], linestyle="", marker="o", **rim, **look)
            if kind in waits:
                xs, ys = zip(*waits[kind], strict=True)
                self.ax.plot(xs, ys, linestyle="", marker="D", **look)
        return lines

    def _draw_link(self, link: Link) -> None:
        color = LOOKS["collective"][1] if link.whole else LOST
        places, ranks = zip(*sorted(link.points, key=lambda point: point[1]), strict=True)
        look = {"color": color, "linewidth": 1.6, "linestyle": "-" if link.whole else DASHES}
        if len(self.lanes.links) * 2 * MARKER > 0.8 * 72 * WIDE:
            look["linewidth"] = 0.8
        else:
            look |= {"marker": "o", "markersize": MARKER, "markerfacecolor": PAPER}
            look |= {"markeredgecolor": color, "markeredgewidth": 1.2}
        self.ax.plot(places, ranks, zorder=3.5, **look)
        for rank in range(min(ranks), max(ranks) + 1):  # no label there
            self._is_free(min(places) - 0.05 / self.scale, max(places) + 0.05 / self.scale, rank)

    def _draw_lost(self, lost: Arrow, lines: Lines) -> None:
        """Draw the end of an arrow without another end and, if there is room, what never happened.

        lines: where those of what is under way begin and end.
        """
        sent = lost.never == "never received"
        src = lost.src if lost.src is not None else -1
        side = math.copysign(1, lost.dst - src) * (1 if sent else -1)
        rank, at = (src, lost.begin) if sent else (lost.dst, lost.end)
        near = (at, rank + HALF * side)
        if (key := lost.send or lost.recv) in lines:
            (begin, y), (end, _) = lines[key]
            near = ((begin + end) / 2 if sent else end, y)
        far = (near[0] + 0.14 / self.scale * (1 if sent else -1), near[1] + 0.19 * side)
        style.arrow(self.ax, *((near, far) if sent else (far, near)), LOST, linestyle=DASHES)
        _, high = self.ax.get_xlim()
        begin = max(near[0], far[0]) + 0.05 / self.scale
        end = begin + self._width(lost.never)
        if end > high:
            end = min(near[0], far[0]) - 0.05 / self.scale
            begin = end - self._width(lost.never)
        if self._is_free(begin, end, far[1]):
            self._write(begin, far[1], lost.never, color=LOST, zorder=5)

    def _write_names(self) -> None:
        """Write the names of collectives above the lanes, each that is shared above a bracket."""
        slant = {"rotation": self.slant, "rotation_mode": "anchor", "va": "baseline"}
        slant |= {"ha": "left" if self.slant else "center"}
        foot, top = -0.5 - 0.02 / self.lane, -0.5 - 0.08 / self.lane
        y = top - 0.03 / self.lane if self.shared else -0.55
        for name in self.names:
            color = LOOKS["collective"][1] if name.whole else LOST
            if name.end > name.begin and name.text:
                xs = name.begin, name.begin, name.end, name.end
                look = {"color": color, "linewidth": 0.9, "linestyle": "-", "clip_on": False}
                self.ax.plot(xs, (foot, top, top, foot), **look)
            self._write(name.at, y, name.text, color=color, **slant)


def place_names(links: Sequence[Link], scale: float, low: float) -> tuple[int, list[Name]]:
    """Return how to write the names of collectives: their slant in degrees, and each name.

    Where there is no room for each, neighbours with the same name share one, as in
    "all_reduce x 30". If the names still are too close, they are slanted.

    scale: inches of one unit of the axis; low: where the axis begins.
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
                at = min(max(at, low - LEFT / scale + half), low + WIDE / scale - half)
                first, last = at - half, at + half + GAP / scale
            fits = first >= free
            names.append(Name(begin, end, at, text if fits else "", whole))
            free = last if fits else free
        if all(name.text for name in names):
            break
    return slant, names


def flight_levels(flights: Sequence[Flight], lane: float) -> list[int]:
    """Return at which level below its bar each flight is drawn, from 0; lane: inches."""
    most = 1 + max(0, int(((1 - 2 * HALF) * lane - FIRST - 0.04) / LEVEL))
    over: dict[int, list[float]] = {}  # of each rank, where the last flight of each level ends
    levels = [0] * len(flights)
    for i in sorted(range(len(flights)), key=lambda i: flights[i].begin):
        ends = over.setdefault(flights[i].rank, [-math.inf] * most)
        begin, end = flights[i].begin, flights[i].last
        free = (level for level in range(most) if ends[level] <= begin)
        levels[i] = next(free, most - 1)
        ends[levels[i]] = max(ends[levels[i]], end, math.nextafter(begin, math.inf))
    return levels


def _draw_spans(ax: Axes, lanes: Lanes) -> None:
    """Draw when each rank ran and, in time, that it was in no call wherever nothing covers that."""
    half = 0.01 if lanes.zero is None else HALF
    for rank, (begin, end) in enumerate(lanes.spans):
        style.bars(ax, [(begin, end - begin)], (rank - half, 2 * half), NO_CALL, "none")


def _draw_shares(ax: Axes, lanes: Lanes) -> None:
    """Draw each rank's shares of time on each other."""
    edges = np.linspace(*lanes.limits, BINS + 1)
    for rank, of_kinds in enumerate(shares(lanes, edges)):
        base = np.full(BINS, rank + HALF)
        for (fill, edge, hatch), share in zip(LOOKS.values(), of_kinds, strict=True):
            top = base - 2 * HALF * share
            if share.any():
                look = {"facecolor": fill, "edgecolor": edge, "linewidth": 0, "zorder": 2}
                # One shape for all bins: sixty would take a second to draw.
                drawn = ax.stairs(top, edges, baseline=base, fill=True, **look)
                style.set_hatch(drawn, hatch, edge)
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


class Timeline(pictures.Picture):
    """A timeline; `interact()` returns one to zoom into."""

    trace: Trace

    def interact(self) -> TimelineWidget:
        """Return the run in time, to zoom into, for the last line of a cell.

        A click on an event marks its collective or message on every rank, and says who came last.
        It needs no kernel once it is shown. On GitHub, in a book and wherever else there are no
        widgets, this picture takes its place.

        Raises PlotError outside a notebook.
        """
        from ddp_kit.notebook.timeline import TimelineWidget  # for notebooks, and slow to load

        return TimelineWidget(self, self.trace)


def timeline(
    source: Any,
    timed: bool = False,
    title: str | None = None,
    step: int | None = None,
) -> Timeline:
    """Draw what each rank sent and waited for: one bar per rank, one arrow per message.

    source: a trace, or a result or an error, whose `trace` is taken.
    timed: False draws only the order, which is the same on every run: each message or collective
        takes one step, a call or `wait()` also lasts the steps that it waits, what a call only
        starts is a thin line until it is complete, and computing takes none. True draws
        milliseconds since the first rank began.
    step: the training step to draw, from 0; -1 is the last one. By default one with the calls that
        most training steps have; but if the run never ended, what came after the last one.

    Arrows have the colour of the sender; a collective is a vertical line through its ranks. A
    send that was never received, or a receive that was never sent to, is dashed and says so.

    Of a training run, one training step is drawn: see `training_steps`. In other runs with very
    many events, bars are shares of time, and there are no arrows: see `messages`. If a timed run
    begins or ends with a long pause, such as an import, most of the pause is cut off, and the
    caption says how much. `.interact()` of the picture returns the whole run to zoom into.

    Raises PlotError if there is no trace, or it has no event (or, timed, no rank), or no such step.
    """
    trace = pictures.read_trace(source)
    if not trace.events and not (timed and trace.spans):
        raise PlotError("the trace is empty: the ranks sent nothing, there is nothing to draw")
    whole = by_time(trace) if timed else by_steps(trace)
    training = find_training(trace, whole, step)
    title = _title(trace, timed, training and training.total) if title is None else title
    here, shown, cut = "the first rank", "", ""
    if training:
        begin, end = training.window
        lanes = part(whole, begin, end, begin if timed else begin - 0.5)  # the first step is 1
        here, shown = training.name, f"{training.label}."
    else:
        window = busy(whole) if timed else whole.limits
        lanes, cut = part(whole, *window), _say_cut(whole, window)
    panel = Panel(lanes, timed)
    if timed:
        text_table = time_table(title, lanes if training else whole)
    elif panel.many or panel.length > settings.TIMELINE_STEPS + 1:
        text_table = rank_table(title, trace, whole)
    else:
        text_table = step_table(title, trace, whole, training.window if training else whole.limits)
    text_table += "".join(f"\n{line}" for line in (shown, cut) if line)

    parts = [shown, _caption(panel), cut]
    if any(trace.dropped):
        parts.append(f"The {sum(trace.dropped):,} oldest events were dropped and are not shown.")
    kinds = {bar.kind for bar in lanes.bars}
    key = {"not in a call": (NO_CALL, "none")} if timed else {}
    key |= {text: LOOKS[kind] for kind, text in NAMES.items() if kind in kinds}
    top = 0.36 + panel.head
    foot = top + panel.tall + 0.5
    caption = " ".join(filter(None, parts))
    full = LEFT + WIDE + 0.15
    picture, sheet = pictures.open_picture(title, text_table, full, foot + 0.25, caption, Timeline)
    picture.trace = trace
    xlabel = f"time since {here} began (ms)" if timed else "step"
    panel.draw(picture, sheet, top, xlabel)
    style.draw_key(sheet, LEFT, foot, key)
    return picture


def _title(trace: Trace, timed: bool, training_steps: int | None) -> str:
    counts = [(len(trace.messages()), "message"), (len(trace.collectives), "collective")]
    what = " and ".join(count(number, noun) for number, noun in counts if number)
    ranks = count(trace.world_size, "rank")
    if training_steps:
        ranks += f" in {count(training_steps, 'training step')}"
    return f"{what or 'No message'} on {ranks}, {'in time' if timed else 'step by step'}"


def _say_cut(lanes: Lanes, window: tuple[float, float]) -> str:
    """Return which pauses at the beginning and the end are not in a timed picture."""
    begin, end = lanes.limits
    parts = []
    for name, low, high in (("first", begin, window[0]), ("last", window[1], end)):
        if high > low:
            calls = sum(low <= (b.begin if name == "first" else b.end) <= high for b in lanes.bars)
            calls = count(calls, "call") if calls else "no call"
            parts.append(f"the {name} {style.significant((high - low) / 1e3)} s ({calls})")
    text = " and ".join(parts)
    return f"Not shown: {text}." if text else ""


def _caption(panel: Panel) -> str:
    lanes, timed = panel.lanes, panel.timed
    if panel.many:
        return (
            "Too many events to draw one by one: the height of a colour is its share of each "
            f"1/{BINS} of the picture. Messages and collectives are left out; kit.plot.messages "
            "shows who sent how much to whom."
        )
    color = ", in its sender's colour" if timed else ""
    when = ", drawn when its last rank called it; a bar is the wait for it" if timed else ""
    split = any(not link.whole for link in lanes.links)
    parts = {
        "One bar per rank."
        if timed
        else "Each message or collective takes one step, and a longer bar is a wait. "
        "Computing takes none.": True,
        f"An arrow is a message{color}.": lanes.arrows,
        "\N{WHITE CIRCLE}\N{BOX DRAWINGS LIGHT HORIZONTAL}: from a call that returned at once "
        f"until it is {'known to be ' * timed}complete.": panel.flights,
        "\N{BLACK DIAMOND}:\N{NO-BREAK SPACE}its\N{NO-BREAK SPACE}wait().": any(
            each.wait is not None for each in panel.flights
        ),
        f"A vertical line is a collective{when}.": lanes.links,
        "A bracket joins collectives with the same name.": panel.shared,
        "Some names of collectives are left out for lack of space.": any(
            not name.text for name in panel.names
        ),
        "A dashed line: some ranks did not call it, or called another collective.": split,
        "A dashed arrow: a message that was never sent or never received.": any(
            arrow.never for arrow in lanes.arrows
        ),
    }
    return " ".join(part for part, applies in parts.items() if applies)
