"""What every rank sent and waited for, in order or in time: one bar per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddp_kit.error_text import count
from ddp_kit.errors import PlotError
from ddp_kit.plot import timeline_marks as marks
from ddp_kit.plot import timeline_steps as in_steps
from ddp_kit.plot.picture import (
    Picture,
    borders_caption,
    host_borders,
    open_picture,
    read_trace,
    room_for,
)
from ddp_kit.plot.style import (
    INK,
    NO_CALL,
    PAPER,
    QUIET,
    chip,
    draw_key,
    key_places,
    significant,
    write,
)
from ddp_kit.plot.timeline_lanes import Lanes, busy, by_steps, by_time, part
from ddp_kit.plot.timeline_marks import LEFT
from ddp_kit.trace import Trace

if TYPE_CHECKING:
    from ddp_kit.notebook.timeline import TimelineWidget

IN_FLIGHT = "in flight: called, not waited for yet"
NAMES = {"send": "in a send", "recv": "in a receive", "collective": "in a collective"}
STEP = 1.2  # inches of a step, where there is room
NARROW = 2.6  # inches of the narrowest lanes


class Panel:
    """The lanes of all ranks over one axis. head: inches of the names above them; tall: inches.

    wide: inches of the axis: as many as the steps need, unless it is time, or a part of a run.
    at_least: of these. many: there are too many events to draw them one by one.
    """

    def __init__(
        self, lanes: Lanes, timed: bool, at_least: float = NARROW, is_part: bool = False
    ) -> None:
        begin, end = lanes.limits
        self.lanes, self.timed = lanes, timed
        self.length = 1.003 * ((end - begin) or 1)
        self.wide = marks.WIDE
        if not timed and not is_part:
            self.wide = min(marks.WIDE, max(NARROW, at_least, STEP * (end - begin)))
        self.scale = self.wide / self.length
        n = len(lanes.spans)
        marks_needed = 2 * len(lanes.arrows) + len(lanes.links)
        long = not timed and end - begin > marks.MOST_STEPS and bool(lanes.arrows)
        self.many = marks_needed > marks.MOST_MARKS or long
        most = 0.78 if lanes.flights and not self.many else 0.62
        self.lane = max(0.36, min(most, 6.8 * most / n))
        self.below = 0.12 if lanes.flights and not self.many else 0.0  # room for the lowest flight
        self.tall = n * self.lane + self.below
        slant, names = marks.place_names(lanes.links, self.scale, begin, self.wide)
        if self.many and (slant or not all(name.text for name in names)):
            names = []
        self.slant, self.names = slant, names
        self.head = marks.head_room(slant, names)

    @property
    def unnamed(self) -> bool:
        """Whether the name of a collective is left out for lack of space."""
        return any(not name.text for name in self.names)

    def draw(
        self,
        picture: Picture,
        sheet: Axes,
        top: float,
        xlabel: str,
        borders: Sequence[int] = (),
    ) -> None:
        """Draw the lanes, `top` inches below the top of the picture, with their ranks.

        borders: the ranks above whose lanes a line separates two hosts.
        """
        n = len(self.lanes.spans)
        lane = self.lane
        for rank in range(n):
            chip(sheet, 0, top + (rank + 0.5) * lane, 0.62, rank, f"rank {rank}")
        ax = picture.chart(LEFT, top, self.wide, self.tall, "x", xlabel)
        begin, _ = self.lanes.limits
        ax.set(xlim=(begin, begin + self.length), ylim=(self.tall / lane - 0.5, -0.5))
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        steps = [1, 2, 5, 10]  # no ticks of 80 ms
        locator = MaxNLocator(nbins=12, steps=steps, integer=not self.timed, min_n_ticks=1)
        ax.xaxis.set_major_locator(locator)
        if not self.timed:  # lines between the steps
            ax.grid(False)
            if self.length <= marks.MOST_STEPS + 1:
                between = [begin + step for step in range(1, round(self.length))]
                ax.set_xticks(between, minor=True)
                ax.tick_params(axis="x", which="minor", length=0)
                style = {"color": "#ececec", "linewidth": 0.8, "linestyle": "-"}
                ax.grid(True, axis="x", which="minor", **style)
        for border in borders:
            ends = [begin - (LEFT - 0.02) / self.scale, begin + self.length]
            style = {"color": INK, "linewidth": 1.8, "linestyle": "-", "clip_on": False}
            ax.plot(ends, [border - 0.5 + self.below / lane] * 2, zorder=1, **style)
        labels = marks.Labels(self.scale, lane)
        if self.many:
            marks.draw_shares(ax, self.lanes, labels)
        else:
            marks.draw_each(ax, self.lanes, labels)
        marks.write_names(ax, self.slant, self.names, lane)


class Timeline(Picture):
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
    per_host: int | None = None,
) -> Timeline:
    """Draw what each rank sent and waited for: one bar per rank, one arrow per message.

    source: a trace, or a result or an error, whose `trace` is taken.
    timed: False draws only the order, which is the same on every run: each message or collective
        takes one step, a call or `wait()` also lasts the steps that it waits, what is started and
        not yet waited for is a thin line, and computing takes none. True draws milliseconds since
        the first rank began.
    step: the training step to draw in large, from 0; -1 is the last one. By default one with the
        calls that most training steps have and, timed, with the median duration of those; but if
        the run never ended, what came after the last one.
    per_host: the ranks of each host, if there are several: heavy lines then separate the hosts.

    Arrows have the colour of the sender; a collective is a vertical line through its ranks. A
    send that was never received, or a receive that was never sent to, is dashed and says so.

    A training run is drawn in small, with a block for each training step, and one step in large:
    see `training_steps`. In other runs with very many events, bars are shares of time, and an
    arrow stands for many messages, with their number. If a timed run begins or ends with a long
    pause, such as an import, most of the pause is cut off, and the caption says how much.
    `.interact()` of the picture returns one to zoom into.

    Raises PlotError if there is no trace, or it has no event (or, timed, no rank), or no such step,
    or `per_host` is not a positive whole number.
    """
    trace = read_trace(source)
    if not trace.events and not (timed and trace.spans):
        raise PlotError("the trace is empty: the ranks sent nothing, there is nothing to draw")
    borders = host_borders(trace.world_size, per_host)
    whole = by_time(trace) if timed else by_steps(trace)
    training = in_steps.find_training(trace, whole, step)
    window = busy(whole) if timed else whole.limits
    lanes = part(whole, *window)
    cut = _say_cut(whole, window)
    title = _title(trace, timed, training and len(training.spans)) if title is None else title

    top, overview = 0.36, None
    if not training:
        large = Panel(lanes, timed, room_for(title) - LEFT)
        xlabel = "time since the first rank began (ms)" if timed else "step"
    else:
        shown, (begin, end) = training.label, training.window
        zero = begin if timed else begin - 0.5  # the first step is 1
        overview = in_steps.Overview(lanes, training)
        large = Panel(part(whole, begin, end, zero), timed, is_part=True)
        here = "this training step" if training.shown is not None else "this part"
        xlabel = f"time since {here} began (ms)" if timed else f"order of the operations in {here}"
        top += overview.whole + 0.28
    top += large.head
    if timed:
        text_table = in_steps.time_table(title, whole)
        text_table += f"\n{in_steps.time_table(shown, large.lanes)}" if training else ""
        text_table += f"\n{cut}" if cut else ""
    elif training:
        text_table = in_steps.steps_table(title, trace, training)
        text_table += f"\n{in_steps.step_table(shown, trace, whole, (begin, end))}"
    elif large.many:
        text_table = in_steps.rank_table(title, trace, whole)
    else:
        text_table = in_steps.step_table(title, trace, whole, whole.limits)

    parts = []
    if training:
        is_median = timed and step is None and training.shown is not None
        parts.append(_whole_caption(timed, is_median))
    parts += [_caption_of_many(large.lanes) if large.many else _caption(large, timed), cut]
    if borders:
        parts.append(f"{borders_caption(trace.world_size, borders[0])}.")
    if any(trace.dropped):
        parts.append(f"The {sum(trace.dropped):,} oldest events were dropped and are not shown.")
    key = _key(lanes, large.many)
    full = LEFT + large.wide + 0.15
    *_, (at, rows) = key_places(key, full - LEFT)
    caption, foot = " ".join(filter(None, parts)), top + large.tall + 0.5
    picture, sheet = open_picture(title, text_table, full, foot + rows + 0.25, caption, Timeline)
    picture.trace = trace
    if overview:
        overview.draw(picture, sheet, 0.3)
        write(sheet, LEFT, 0.3 + overview.whole + 0.13, shown, 9, weight="bold")
    large.draw(picture, sheet, top, xlabel, borders)
    draw_key(sheet, LEFT, foot, key, full - LEFT)
    if key.get(IN_FLIGHT) == ():
        _draw_flight(sheet, LEFT + at, foot + rows + 0.07)
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
            parts.append(f"the {name} {significant((high - low) / 1e3)} s ({calls})")
    text = " and ".join(parts)
    return f"Not shown: {text}." if text else ""


def _whole_caption(timed: bool, is_median: bool) -> str:
    """Return what the whole run in small means. is_median: the step was chosen by its duration."""
    parts = [
        "Above: the whole run. Each block is a training step: calls that every rank repeats"
        + (", and the computing before them." if timed else ".")
    ]
    if timed:
        parts.append("Under the blocks, the height of a colour is its share of a rank's time.")
    parts.append(f"Below: the dark block in large{', of median duration' if is_median else ''}.")
    return " ".join(parts)


def _caption(panel: Panel, timed: bool) -> str:
    """Return what the picture does not show by itself."""
    lanes = panel.lanes
    color = ", in its sender's colour" if timed else ""
    when = ", drawn when its last rank called it; a bar is the wait for it" if timed else ""
    split = any(not link.whole for link in lanes.links)
    never = any(arrow.never for arrow in lanes.arrows)
    shared = any(name.end > name.begin for name in panel.names)
    parts = {
        "One bar per rank."
        if timed
        else "Each message or collective takes one step, and a longer bar is a wait. "
        "Computing takes none.": True,
        f"An arrow is a message{color}.": lanes.arrows,
        f"A vertical line is a collective{when}.": lanes.links,
        "A bracket joins collectives with the same name.": shared,
        "Some names of collectives are left out for lack of space.": panel.unnamed,
        "A dashed line: some ranks did not call it, or called another collective.": split,
        "A dashed arrow: a message that was never sent or never received.": never,
    }
    return " ".join(part for part, applies in parts.items() if applies)


def _caption_of_many(lanes: Lanes) -> str:
    """Return what the colours and arrows mean where events are not drawn one by one."""
    parts = [
        "Too many events to draw one by one: the height of a colour is its share of each "
        f"1/{marks.BINS} of the picture."
    ]
    pairs, cuts = marks.count_pairs(lanes)
    if pairs and cuts:
        where = f"in each 1/{cuts}" if cuts > 1 else "in the whole"
        parts.append(
            f"An arrow is all messages of its pair {where} of the picture, and its number,"
        )
        parts.append("where there is room for it, is their count.")
    elif pairs:
        parts.append(f"No arrows: {len(pairs)} pairs of ranks. kit.plot.messages shows them.")
    if any(arrow.never for arrow in lanes.arrows):
        parts.append("Dashed: never received, or never sent.")
    if lanes.links:
        parts.append("Collectives have no line of their own here.")
    return " ".join(parts)


def _key(lanes: Lanes, many: bool) -> dict[str, tuple]:
    """Return the names of what is drawn, each with its look; () is a flight, the last one."""
    kinds = {bar.kind for bar in lanes.bars}
    looks: dict[str, tuple] = {"not in a call": (NO_CALL, "none")}
    looks |= {text: marks.LOOKS[kind] for kind, text in NAMES.items() if kind in kinds}
    return looks | ({IN_FLIGHT: ()} if lanes.flights and not many else {})


def _draw_flight(sheet: Axes, x: float, y: float) -> None:
    ends = [x + 0.03, x + 0.23]
    style = {"color": QUIET, "linewidth": 1.4, "linestyle": "-"}
    sheet.plot(ends, [y, y], **style)
    sheet.plot(ends[:1], [y], markerfacecolor=PAPER, **marks.CALLED, **style)
    sheet.plot(ends[1:], [y], **marks.WAITED, **style)
