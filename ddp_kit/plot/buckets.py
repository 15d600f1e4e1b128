"""How much of DDP's communication is hidden behind computing: a bar a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from ddp_kit.plot.marks import dress
from ddp_kit.plot.numbers import significant, size, table
from ddp_kit.plot.picture import Picture, label_axes
from ddp_kit.plot.source import read_trace
from ddp_kit.plot.style import INK, QUIET, fold, write
from ddp_kit.trace.events import Event

OP = "DDP all_reduce"
HIDDEN, OPEN = ("#8fb8b0", None), ("#f3c9cf", "/////")  # fill, hatch
EDGE, LATE = "#3f4f5f", "#882255"
LEFT, TOP, WIDE, ROW = 1.45, 0.62, 6.4, 0.32  # inches
MOST_BARS = 40


def buckets(
    source: Any, rank: int = 0, step: int | None = None, title: str | None = None
) -> Picture:
    """Draw one backward of DDP on one rank: each bucket from ready to reduced.

    source: a trace, or a result or an error, whose `trace` is taken.
    rank: whose backward.
    step: which of its backwards, from 0; the last one by default, -2 the one before.

    A bucket is ready when its last gradient is computed; then its all_reduce begins. What of
    it lies before the last bucket is ready is hidden behind computing, and coloured so; the
    rest keeps the rank waiting. Milliseconds since the first bucket was ready.

    ValueError if the rank had no DDP backward, or not this one. TypeError without a trace.
    """
    backwards = _backwards([e for e in read_trace(source) if e.rank == rank and e.op == OP])
    if not backwards:
        raise ValueError(f"rank {rank} ran no backward of a DistributedDataParallel model")
    which = len(backwards) - 1 if step is None else step
    if not -len(backwards) <= which < len(backwards):
        raise ValueError(f"step must be below {len(backwards)}, got {which}")
    events = backwards[which]
    zero = events[0].start
    last = max((e.end for e in events if e.end is not None), default=None)
    bars = []
    computed = events[-1].start  # not when the wait begins: a busy core may delay that
    edge = max(last or 0, computed)
    for event in events:
        end = edge if event.end is None else event.end
        hidden = max(0, min(end, computed) - event.start)
        bars.append([(at - zero) / 1e6 for at in (event.start, event.start + hidden, end)])
    whole = sum(end - begin for begin, _, end in bars)
    share = sum(middle - begin for begin, middle, _ in bars) / whole if whole else 1.0
    over = (computed - zero) / 1e6
    if title is None:
        title = f"DDP backward on rank {rank}: {share:.0%} of all_reduce hidden behind computing"
    rows = [
        [
            f"bucket {i}",
            f"{event.nbytes:,}",
            _ms(begin),
            _ms(end) if event.end is not None else "never",
            _ms(middle - begin),
            _ms(end - middle),
        ]
        for i, (event, (begin, middle, end)) in enumerate(zip(events, bars, strict=True))
    ]
    header = ["", "bytes", "ready (ms)", "reduced (ms)", "hidden (ms)", "not hidden (ms)"]
    number = which % len(backwards) + 1
    said = f"Backward {number} of {len(backwards)}. Computing ended at {_ms(over)} ms"
    late = max(end for _, _, end in bars) - over
    said += f"; rank {rank} then waited {_ms(max(0.0, late))} ms."
    twin = table(title, header, rows) + f"\n{said}"

    shown = bars[:MOST_BARS]
    if len(bars) > len(shown):
        said += f" The first {MOST_BARS} of {len(bars)} buckets are drawn."
    height = ROW * len(shown) if len(shown) <= 16 else 0.2 * len(shown)
    lines = fold(said, LEFT + WIDE)
    picture = Picture(LEFT + WIDE + 0.3, TOP + height + 0.85 + 0.17 * len(lines), twin)
    sheet = picture.sheet()
    write(sheet, 0.02, 0.12, title, 11.5, weight="bold")
    ax = picture.chart(LEFT, TOP, WIDE, height, grid="x")
    label_axes(ax, "time since the first bucket was ready (ms)")
    for place, (begin, middle, end) in enumerate(shown):
        _bar(ax, begin, middle - begin, place, HIDDEN)
        _bar(ax, middle, end - middle, place, OPEN, events[place].end is None)
    ax.axvline(over, color=LATE, linewidth=1.4, linestyle=(0, (4, 2)), zorder=3)
    longest = max(max(end for _, _, end in bars), over) or 1
    ax.set(xlim=(0, 1.03 * longest), ylim=(len(shown) - 0.5, -0.5))
    names = [f"bucket {i}, {size(e.nbytes)}" for i, e in enumerate(events[: len(shown)])]
    ax.set_yticks(range(len(shown)), names)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9))
    to_right = over > 0.6 * longest
    style = {"color": LATE, "ha": "right" if to_right else "left"}
    write(ax, over, -0.62, "computing ends", 8.5, **{**style, "va": "bottom"})
    _key(sheet, LEFT, TOP + height + 0.6)
    for i, line in enumerate(lines):
        write(sheet, 0.02, TOP + height + 0.9 + 0.17 * i, line, 8.5, color=QUIET)
    return picture


def _backwards(events: Sequence[Event]) -> list[list[Event]]:
    """Split the buckets of a rank into backwards: one is over when a rank waits for it."""
    found: list[list[Event]] = []
    over = None
    for event in sorted(events, key=lambda event: event.index):
        if not found or (over is not None and event.start >= over):
            found.append([])
            over = None
        found[-1].append(event)
        over = event.waited if event.waited is not None else over
    return found


def _ms(value: float) -> str:
    return significant(value) if value else "0"


def _bar(ax, begin: float, length: float, place: int, look, never: bool = False) -> None:
    if length <= 0:
        return
    fill, hatch = look
    edge = {"edgecolor": LATE if never else EDGE, "linestyle": (0, (3, 2)) if never else "-"}
    drawn = ax.broken_barh([(begin, length)], (place - 0.3, 0.6), facecolor=fill, **edge)
    drawn.set(linewidth=0.7, zorder=2)
    dress(drawn, hatch, EDGE)


def _key(sheet, x: float, y: float) -> None:
    for look, said in ((HIDDEN, "hidden behind computing"), (OPEN, "not hidden")):
        style = {"facecolor": look[0], "edgecolor": EDGE, "linewidth": 0.7, "linestyle": "-"}
        dress(sheet.broken_barh([(x, 0.26)], (y - 0.07, 0.14), **style), look[1], EDGE)
        write(sheet, x + 0.34, y, said, 8.5, color=INK)
        x += 0.6 + 0.075 * len(said)
