"""What every rank sent and waited for, in order or in time: one bar per rank."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddp_kit.error_text import count
from ddp_kit.errors import PlotError
from ddp_kit.plot import timeline_marks as marks
from ddp_kit.plot.picture import Picture, open_picture, read_trace, table
from ddp_kit.plot.style import chip, fold, significant, swatch
from ddp_kit.plot.timeline_lanes import Lanes, absent, by_steps, by_time, unmatched
from ddp_kit.trace import Trace
from ddp_kit.trace.logical import steps

if TYPE_CHECKING:
    from ddp_kit.notebook.timeline import TimelineWidget

LEFT, WIDE = 0.75, 7.95  # inches
NAMES = {"send": "sending", "recv": "waiting to receive", "collective": "in a collective"}
MOST_EVENTS, MOST_STEPS = 240, 48  # above, events are drawn and counted together


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


def timeline(source: Any, timed: bool = False, title: str | None = None) -> Timeline:
    """Draw what each rank sent and waited for: one bar per rank, one arrow per message.

    source: a trace, or a result or an error, whose `trace` is taken.
    timed: False draws only the order, which is the same on every run: an operation takes one
        step, a receive or collective also the steps it waits, and computing takes none. True
        draws milliseconds since the first rank began.

    Arrows have the colour of the sender; a collective is a vertical line through its ranks. A
    send that was never received, or a receive that was never sent to, is dashed and says so.
    Above 240 events (or 48 steps) bars are shares of time, and an arrow stands for many messages,
    with their number. `.interact()` of the picture returns one to zoom into.

    Raises PlotError if there is no trace, or it has no event (or, timed, no rank).
    """
    trace = read_trace(source)
    if not trace.events and not (timed and trace.spans):
        raise PlotError("the trace is empty: the ranks sent nothing, there is nothing to draw")
    lanes = by_time(trace) if timed else by_steps(trace)
    begin, end = lanes.limits
    many = len(trace.events) > MOST_EVENTS or (not timed and end - begin > MOST_STEPS)
    title = _title(trace, timed) if title is None else title
    if timed:
        text_table = _time_table(title, lanes)
    else:
        text_table = _rank_table(title, trace, lanes) if many else _step_table(title, trace)

    n = trace.world_size
    tall = n * max(0.36, min(0.62, 4.2 / n))
    scale = WIDE / (1.003 * ((end - begin) or 1))
    slant, names = marks.place_names(() if many else lanes.links, scale)
    top = 0.36 + marks.head_room(slant, names)
    unnamed = any(not text for _, text, _ in names)
    caption = _caption_of_many(lanes) if many else _caption(lanes, unnamed, timed)
    if any(trace.dropped):
        caption += f" The {sum(trace.dropped):,} oldest events were dropped and are not shown."
    lines = fold(caption, LEFT + WIDE)
    full, below = LEFT + WIDE + 0.15, top + tall + 0.5
    picture, sheet = open_picture(
        title, text_table, full, below + 0.3, lines, lift=0.04, kind=Timeline
    )
    picture.trace = trace
    for rank in range(n):
        chip(sheet, 0.02, top + (rank + 0.5) * tall / n - 0.11, 0.62, 0.22, rank, f"rank {rank}")
    xlabel = "time since the first rank began (ms)" if timed else "step"
    ax = picture.chart(LEFT, top, WIDE, tall, "x", xlabel)
    ax.set(xlim=(begin, begin + 1.003 * ((end - begin) or 1)), ylim=(n - 0.5, -0.5))
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=not timed, min_n_ticks=1))
    if many:
        marks.draw_shares(ax, lanes)
    else:
        marks.draw_each(ax, lanes, scale)
        marks.write_names(ax, slant, names)
    _key(sheet, LEFT, below + 0.08 - 0.06, lanes, timed)
    return picture


def _title(trace: Trace, timed: bool) -> str:
    counts = [(len(trace.messages()), "message"), (len(trace.collectives), "collective")]
    what = " and ".join(count(number, noun) for number, noun in counts if number)
    ranks = count(trace.world_size, "rank")
    return f"{what or 'No message'} on {ranks}, {'in time' if timed else 'step by step'}"


def _caption(lanes: Lanes, unnamed: bool, timed: bool) -> str:
    """Return what the picture does not show by itself."""
    color = ", in its sender's colour" if timed else ""
    when = ", drawn when its last rank called it" if timed else ""
    split = any(not link.whole for link in lanes.links)
    never = any(arrow.never for arrow in lanes.arrows)
    parts = {
        "One bar per rank." if timed else "An operation takes a step; computing takes none.": True,
        f"An arrow is a message{color}.": lanes.arrows,
        f"A vertical line is a collective{when}.": lanes.links,
        "Some names of collectives are left out for lack of space.": unnamed,
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
        parts.append(f"An arrow is all messages of its pair {where} of the picture, and its number")
        parts.append("is their count.")
    elif pairs:
        parts.append(f"No arrows: {len(pairs)} pairs of ranks. kit.plot.messages shows them.")
    if any(arrow.never for arrow in lanes.arrows):
        parts.append("Dashed: never received, or never sent.")
    if lanes.links:
        parts.append("Collectives have no line of their own here.")
    return " ".join(parts)


def _key(sheet: Axes, x: float, y: float, lanes: Lanes, timed: bool) -> None:
    """Draw what the bars mean, for the kinds that occur; x, y: inches on the sheet."""
    kinds = {bar.kind for bar in lanes.bars}
    if timed:
        swatch(sheet, x, y, "computing", marks.COMPUTING, "none")
        x += 1.25
    for kind, text in NAMES.items():
        if kind in kinds:
            x = swatch(sheet, x, y, text, *marks.LOOKS[kind])


def _step_table(title: str, trace: Trace) -> str:
    """Return the table of a short trace: one row per step, one column per rank."""
    at, never = steps(trace), unmatched(trace)
    without = {
        (rank, event.index): f" (without {', '.join(map(str, missing))})"
        for members in trace.collectives
        if (missing := absent(trace, members))
        for rank, event in members.items()
    }
    rows: dict[int, list[str]] = {}
    for event in trace:
        key = event.rank, event.index
        peer = "any" if event.peer is None else event.peer
        text = event.op + {"send": f" → {peer}", "recv": f" ← {peer}"}.get(event.kind, "")
        text += f" ({never[key]})" if key in never else without.get(key, "")
        rows.setdefault(at[key], [""] * trace.world_size)[event.rank] = text
    header = ["step", *(f"rank {rank}" for rank in range(trace.world_size))]
    lines = [[str(step + 1), *rows[step]] for step in sorted(rows)]
    return table(title, header, lines, align="<")


def _rank_table(title: str, trace: Trace, lanes: Lanes) -> str:
    """Return the table of a long trace: one row per rank."""
    counts = Counter((event.rank, event.kind) for event in trace)
    never = Counter((rank, mark) for (rank, _), mark in unmatched(trace).items())
    waited: Counter[int] = Counter()
    for bar in lanes.bars:
        waited[bar.rank] += round(bar.end - bar.begin - 1)  # one step is the operation's own
    sent: Counter[int] = Counter()
    for message in trace.messages():
        sent[message.src] += message.nbytes
    header = ["", "sends", "bytes sent", "receives", "collectives", "steps waited"]
    found = [m for m in ("never received", "never sent") if any(m == k for _, k in never)]
    rows = [
        [
            f"rank {rank}",
            f"{counts[rank, 'send']:,}",
            f"{sent[rank]:,}",
            f"{counts[rank, 'recv']:,}",
            f"{counts[rank, 'collective']:,}",
            f"{waited[rank]:,}",
            *(f"{never[rank, mark]:,}" for mark in found),
        ]
        for rank in range(trace.world_size)
    ]
    return table(title, [*header, *found], rows)


def _time_table(title: str, lanes: Lanes) -> str:
    """Return the table of the timed form: milliseconds of each rank."""
    spent: Counter[tuple[int, str]] = Counter()
    for bar in lanes.bars:
        spent[bar.rank, bar.kind] += bar.end - bar.begin
    rows = []
    for rank, (begin, end) in enumerate(lanes.spans):
        waits = [spent[rank, kind] for kind in ("send", "recv", "collective")]
        rest = max(0.0, end - begin - sum(waits))
        rows.append([f"rank {rank}", *map(significant, (rest, *waits, end - begin))])
    header = ["", "computing", "in sends", "waiting to receive", "in collectives", "all"]
    return table(f"{title} (ms)", header, rows)
