"""What every rank sent and waited for, in order or in time: a bar a rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

from matplotlib.ticker import MaxNLocator

from ddp_kit.failures import count
from ddp_kit.plot import bins, legend, marks
from ddp_kit.plot.lanes import Lanes, by_steps, by_time
from ddp_kit.plot.numbers import significant, table
from ddp_kit.plot.picture import Picture, label_axes
from ddp_kit.plot.source import absent, read_trace, unmatched
from ddp_kit.plot.style import QUIET, chip, fold, write
from ddp_kit.trace import Trace
from ddp_kit.trace.logical import steps

LEFT, WIDE = 0.75, 7.95  # inches
MOST_EVENTS, MOST_STEPS = 240, 48  # above, events are drawn and told together


def timeline(source: Any, timed: bool = False, title: str | None = None) -> Picture:
    """Draw what each rank sent and waited for: a bar a rank, an arrow a message.

    source: a trace, or a result or an error, whose `trace` is taken.
    timed: False draws the order alone, which is the same on every run: an operation takes a
        step, a receive or collective also the steps it is waited for, and computing takes
        none. True draws milliseconds since the first rank began.

    Arrows have the colour of the sender; a collective is a vertical line through its ranks. A
    send that nobody received, or a receive that nobody sent to, is dashed and says so. Above
    240 events (or 48 steps) bars are shares of time, and an arrow stands for many messages,
    with their number.

    ValueError if the trace has no event (or, timed, no rank). TypeError without a trace.
    """
    trace = read_trace(source)
    if not trace.events and not (timed and trace.spans):
        raise ValueError("the trace is empty: the ranks sent nothing, there is nothing to draw")
    lanes = by_time(trace) if timed else by_steps(trace)
    begin, end = lanes.limits
    many = len(trace.events) > MOST_EVENTS or (not timed and end - begin > MOST_STEPS)
    if title is None:
        title = _title(trace, timed)
    if timed:
        twin = _times(title, trace, lanes)
    else:
        twin = _totals(title, trace, lanes) if many else _order(title, trace)

    n = trace.world_size
    tall = n * max(0.36, min(0.62, 4.2 / n))
    scale = WIDE / (1.003 * ((end - begin) or 1))
    names = [] if many else legend.place_names(lanes.links, scale)
    top = 0.36 + legend.head_room(names)
    said = bins.caption(lanes) if many else legend.caption(lanes, names, timed)
    if any(trace.dropped):
        said += f" The {sum(trace.dropped):,} oldest events were not kept and are not here."
    lines = fold(said, LEFT + WIDE)
    below = top + tall + 0.5
    picture = Picture(LEFT + WIDE + 0.15, below + 0.3 + 0.17 * len(lines), twin)
    sheet = picture.sheet()
    write(sheet, 0.02, 0.12, title, 11.5, weight="bold")
    for rank in range(n):
        chip(sheet, 0.02, top + (rank + 0.5) * tall / n - 0.11, 0.62, 0.22, rank, f"rank {rank}")
    ax = picture.chart(LEFT, top, WIDE, tall, grid="x")
    label_axes(ax, "time since the first rank began (ms)" if timed else "step")
    ax.set(xlim=(begin, begin + 1.003 * ((end - begin) or 1)), ylim=(n - 0.5, -0.5))
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=not timed, min_n_ticks=1))
    if many:
        bins.draw(ax, lanes)
    else:
        marks.draw(ax, lanes, scale)
        legend.write_names(ax, names)
    legend.key(sheet, LEFT, below + 0.08, lanes, timed)
    for i, line in enumerate(lines):
        write(sheet, 0.02, below + 0.34 + 0.17 * i, line, 8.5, color=QUIET)
    return picture


def _title(trace: Trace, timed: bool) -> str:
    messages, collectives = len(trace.messages()), len(trace.collectives)
    counts = [(messages, "message"), (collectives, "collective")]
    said = " and ".join(count(number, noun) for number, noun in counts if number)
    ranks = count(trace.world_size, "rank")
    return f"{said or 'No message'} on {ranks}, {'in time' if timed else 'step by step'}"


def _order(title: str, trace: Trace) -> str:
    """Return the twin of a short trace: a row a step, a column a rank."""
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
        said = event.op + {"send": f" → {peer}", "recv": f" ← {peer}"}.get(event.kind, "")
        said += f" ({never[key]})" if key in never else without.get(key, "")
        rows.setdefault(at[key], [""] * trace.world_size)[event.rank] = said
    header = ["step", *(f"rank {rank}" for rank in range(trace.world_size))]
    lines = [[str(step + 1), *rows[step]] for step in sorted(rows)]
    return table(title, header, lines, align="<")


def _totals(title: str, trace: Trace, lanes: Lanes) -> str:
    """Return the twin of a long trace: a row a rank."""
    counts = Counter((event.rank, event.kind) for event in trace)
    never = Counter((rank, mark) for (rank, _), mark in unmatched(trace).items())
    steps_taken: Counter[int] = Counter()
    for bar in lanes.bars:
        steps_taken[bar.rank] += round(bar.end - bar.begin - 1)  # one is the operation's own
    sent = Counter()
    for message in trace.messages():
        sent[message.src] += message.nbytes
    header = ["", "sends", "bytes sent", "receives", "collectives", "steps waited"]
    marks_found = [m for m in ("never received", "never sent") if any(m == k for _, k in never)]
    rows = [
        [
            f"rank {rank}",
            f"{counts[rank, 'send']:,}",
            f"{sent[rank]:,}",
            f"{counts[rank, 'recv']:,}",
            f"{counts[rank, 'collective']:,}",
            f"{steps_taken[rank]:,}",
            *(f"{never[rank, mark]:,}" for mark in marks_found),
        ]
        for rank in range(trace.world_size)
    ]
    return table(title, [*header, *marks_found], rows)


def _times(title: str, trace: Trace, lanes: Lanes) -> str:
    """Return the twin of the timed form: milliseconds a rank."""
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
