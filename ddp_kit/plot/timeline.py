"""What every rank sent and waited for, in order or in time: one bar per rank."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from ddp_kit.error_text import count
from ddp_kit.errors import PlotError
from ddp_kit.plot import timeline_marks as marks
from ddp_kit.plot.picture import Picture, open_picture, read_trace, table
from ddp_kit.plot.style import fold, significant, swatch, write
from ddp_kit.plot.timeline_lanes import Lanes, absent, busy, by_steps, by_time, part, unmatched
from ddp_kit.plot.timeline_names import LEFT, WIDE
from ddp_kit.plot.timeline_panel import MOST_STEPS, Panel
from ddp_kit.plot.timeline_steps import Overview, find_training, steps_table
from ddp_kit.trace import Trace

if TYPE_CHECKING:
    from ddp_kit.notebook.timeline import TimelineWidget

NAMES = {"send": "sending", "recv": "waiting to receive", "collective": "in a collective"}


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
    source: Any, timed: bool = False, title: str | None = None, step: int | None = None
) -> Timeline:
    """Draw what each rank sent and waited for: one bar per rank, one arrow per message.

    source: a trace, or a result or an error, whose `trace` is taken.
    timed: False draws only the order, which is the same on every run: an operation takes one
        step, a receive or collective also the steps it waits, and computing takes none. True
        draws milliseconds since the first rank began.
    step: the training step to draw in large, from 0; -1 is the last one. By default one with the
        calls that most training steps have and, timed, with the median duration of those; but if
        the run never ended, what came after the last one.

    Arrows have the colour of the sender; a collective is a vertical line through its ranks. A
    send that was never received, or a receive that was never sent to, is dashed and says so.

    A training run is drawn in small, with a block for each training step, and one step in large:
    see `training_steps`. In other runs with very many events, bars are shares of time, and an
    arrow stands for many messages, with their number. If a timed run begins or ends with a long
    pause, such as an import, most of the pause is cut off, and the caption says how much.
    `.interact()` of the picture returns one to zoom into.

    Raises PlotError if there is no trace, or it has no event (or, timed, no rank), or no such step.
    """
    trace = read_trace(source)
    if not trace.events and not (timed and trace.spans):
        raise PlotError("the trace is empty: the ranks sent nothing, there is nothing to draw")
    whole = by_time(trace) if timed else by_steps(trace)
    training = find_training(trace, whole, step)
    window = busy(whole) if timed else whole.limits
    lanes = part(whole, *window)
    cut = _say_cut(whole, window)
    title = _title(trace, timed, training and len(training.spans)) if title is None else title

    top, overview = 0.36, None
    if not training:
        large = Panel(lanes, timed)
        xlabel = "time since the first rank began (ms)" if timed else "step"
    else:
        shown, (begin, end) = training.label, training.window
        zero = begin if timed else begin - 0.5  # the first step is 1
        overview, large = Overview(lanes, training), Panel(part(whole, begin, end, zero), timed)
        here = "this training step" if training.shown is not None else "this part"
        xlabel = f"time since {here} began (ms)" if timed else f"order of the operations in {here}"
        top += overview.whole + 0.28
    top += large.head
    if timed:
        text_table = _time_table(title, whole)
        text_table += f"\n{_time_table(shown, large.lanes)}" if training else ""
        text_table += f"\n{cut}" if cut else ""
    elif training:
        text_table = steps_table(title, trace, training)
        text_table += f"\n{_step_table(shown, trace, whole, (begin, end))}"
    elif large.many:
        text_table = _rank_table(title, trace, whole)
    else:
        text_table = _step_table(title, trace, whole, whole.limits)

    parts = []
    if training:
        is_median = timed and step is None and training.shown is not None
        parts.append(_whole_caption(timed, is_median))
    parts += [_caption_of_many(large.lanes) if large.many else _caption(large, timed), cut]
    if any(trace.dropped):
        parts.append(f"The {sum(trace.dropped):,} oldest events were dropped and are not shown.")
    lines = fold(" ".join(filter(None, parts)), LEFT + WIDE)
    full, below = LEFT + WIDE + 0.15, top + large.tall + 0.5
    picture, sheet = open_picture(
        title, text_table, full, below + 0.3, lines, lift=0.04, kind=Timeline
    )
    picture.trace = trace
    if overview:
        overview.draw(picture, sheet, 0.3)
        write(sheet, LEFT, 0.3 + overview.whole + 0.13, shown, 9, weight="bold")
    large.draw(picture, sheet, top, xlabel)
    _key(sheet, LEFT, below + 0.08 - 0.06, lanes, timed)
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
        "One bar per rank." if timed else "An operation takes a step; computing takes none.": True,
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


def _key(sheet: Axes, x: float, y: float, lanes: Lanes, timed: bool) -> None:
    """Draw what the bars mean, for the kinds that occur; x, y: inches on the sheet."""
    kinds = {bar.kind for bar in lanes.bars}
    if timed:
        swatch(sheet, x, y, "computing", marks.COMPUTING, "none")
        x += 1.25
    for kind, text in NAMES.items():
        if kind in kinds:
            x = swatch(sheet, x, y, text, *marks.LOOKS[kind])


def _step_table(title: str, trace: Trace, lanes: Lanes, window: tuple[float, float]) -> str:
    """Return what happened in a part of the order: one row per step, one column per rank."""
    at, never = lanes.steps, unmatched(trace)
    without = {
        (rank, event.index): f" (without {', '.join(map(str, missing))})"
        for members in trace.collectives
        if (missing := absent(trace, members))
        for rank, event in members.items()
    }
    rows: dict[int, list[str]] = {}
    for event in trace:
        key = event.rank, event.index
        if not window[0] <= at[key] + 1 <= window[1]:
            continue
        peer = "any" if event.peer is None else event.peer
        text = event.op + {"send": f" → {peer}", "recv": f" ← {peer}"}.get(event.kind, "")
        text += f" ({never[key]})" if key in never else without.get(key, "")
        rows.setdefault(at[key], [""] * trace.world_size)[event.rank] = text
    header = ["step", *(f"rank {rank}" for rank in range(trace.world_size))]
    lines = [[str(step - min(rows) + 1), *rows[step]] for step in sorted(rows)]
    if len(lines) > MOST_STEPS:
        lines = _join_equal(lines)
    return table(title, header, lines, align="<")


def _join_equal(lines: list[list[str]]) -> list[list[str]]:
    """Return one row for rows that follow each other and differ only in their first column."""
    joined = []
    for _, group in itertools.groupby(lines, key=lambda line: line[1:]):
        same = list(group)
        name = same[0][0] if len(same) == 1 else f"{same[0][0]} to {same[-1][0]}"
        joined.append([name, *same[0][1:]])
    return joined


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
