"""How much of DDP's communication is hidden behind computing: one bar per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from ddp_kit.errors import PlotError
from ddp_kit.plot import style
from ddp_kit.plot.picture import Picture, open_picture, read_trace, table
from ddp_kit.plot.style import COLLECTIVE, DASHES, EDGE, LOST, NO_CALL, bars, significant
from ddp_kit.trace.events import Event
from ddp_kit.trace.training_steps import BUCKET

# An all_reduce is a collective; only what its rank waits for is late.
HIDDEN, OPEN = (COLLECTIVE[0], COLLECTIVE[1], None), ("#f3c9cf", LOST, "/////")
LEFT, TOP, WIDE, ROW = 1.45, 0.62, 6.4, 0.32  # inches
COMPUTING = (NO_CALL, EDGE, None)


def buckets(
    source: Any,
    rank: int = 0,
    step: int | None = None,
    title: str | None = None,
    *,
    began: int | None = None,
) -> Picture:
    """Draw one DDP backward pass on one rank: each bucket from ready to reduced.

    source: a trace, or a result or an error, whose `trace` is taken.
    rank: whose backward pass.
    step: which of its backward passes, from 0; the last one by default, -2 the one before.
    began: when the rank called `backward`, in nanoseconds of `time.monotonic_ns()`. The time axis
    then starts there, and computing has a bar of its own.

    A bucket is ready when its last gradient is computed; then its all_reduce begins. The part
    before the last bucket is ready is hidden behind computing, and coloured so; during the
    rest, the rank waits. Times are milliseconds since `began`, or else since the first bucket was
    ready.

    Raises PlotError if there is no trace, or the rank had no DDP backward pass, or not this one,
    or if `began` is after its first bucket.
    """
    backwards = _backwards([e for e in read_trace(source) if e.rank == rank and e.op == BUCKET])
    if not backwards:
        raise PlotError(f"rank {rank} ran no backward pass of a DistributedDataParallel model")
    total = len(backwards)
    which = total - 1 if step is None else step
    if not -total <= which < total:
        raise PlotError(f"step must be from {-total} to {total - 1}, got {which}")
    events = backwards[which]
    zero = events[0].start if began is None else began
    if zero > events[0].start:
        late = significant((zero - events[0].start) / 1e6)
        raise PlotError(f"began must be before the first bucket was ready, got {late} ms after it")
    computed = events[-1].start  # not when the wait begins: a busy core may delay that
    last = max([computed, *(e.end for e in events if e.end is not None)])
    spans = []
    for event in events:
        end = last if event.end is None else event.end
        hidden = max(0, min(end, computed) - event.start)
        spans.append([(at - zero) / 1e6 for at in (event.start, event.start + hidden, end)])
    whole = sum(end - begin for begin, _, end in spans)
    share = sum(middle - begin for begin, middle, _ in spans) / whole if whole else 1.0
    over = (computed - zero) / 1e6
    if title is None:
        title = f"DDP backward on rank {rank}: {share:.0%} of all_reduce hidden behind computing"
    rows = [
        [
            f"bucket {i}",
            f"{event.nbytes:,}",
            significant(begin),
            significant(end) if event.end is not None else "never",
            significant(middle - begin),
            significant(end - middle),
        ]
        for i, (event, (begin, middle, end)) in enumerate(zip(events, spans, strict=True))
    ]
    header = ["", "bytes", "ready (ms)", "reduced (ms)", "hidden (ms)", "not hidden (ms)"]
    longest = max(end for _, _, end in spans)
    caption = (
        f"Backward {which % total + 1} of {total}. Computing ended at {significant(over)} ms; "
        f"rank {rank} then waited {significant(max(0.0, longest - over))} ms."
    )
    text_table = table(title, header, rows) + f"\n{caption}"

    above = 0 if began is None else 1  # a row for computing
    rows_drawn = above + len(spans)
    height = ROW * rows_drawn if rows_drawn <= 16 else 0.2 * rows_drawn
    full, below = LEFT + WIDE + 0.3, TOP + height + 0.85
    picture, sheet = open_picture(title, text_table, full, below, caption)
    since = "the first bucket was ready" if began is None else "backward began"
    ax = picture.chart(LEFT, TOP, WIDE, height, "x", f"time since {since} (ms)")
    if above:
        bars(ax, [(0, over)], (-1.3, 0.6), *COMPUTING, zorder=2)
    for place, (event, (begin, middle, end)) in enumerate(zip(events, spans, strict=True)):
        for first, length, look in ((begin, middle - begin, HIDDEN), (middle, end - middle, OPEN)):
            if length > 0:
                drawn = bars(ax, [(first, length)], (place - 0.3, 0.6), *look, zorder=2)
                if event.end is None and look is OPEN:
                    drawn.set(edgecolor=LOST, linestyle=DASHES)
    ax.axvline(over, color=LOST, linewidth=1.4, linestyle=DASHES, zorder=3)
    longest = max(longest, over) or 1
    ax.set(xlim=(0, 1.03 * longest), ylim=(len(spans) - 0.5, -above - 0.5))
    names = [f"bucket {i}, {style.byte_size(e.nbytes)}" for i, e in enumerate(events)]
    ax.set_yticks(range(-above, len(spans)), ["computing"] * above + names)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9))
    ha = "right" if over > 0.6 * longest else "left"
    style.write(ax, over, -above - 0.62, "computing ends", 8.5, color=LOST, ha=ha, va="bottom")
    looks = {"hidden behind computing": HIDDEN, "not hidden": OPEN}
    style.draw_key(sheet, LEFT, TOP + height + 0.53, looks)
    return picture


def _backwards(events: Sequence[Event]) -> list[list[Event]]:
    """Split the buckets of a rank into backward passes: one is over when the rank waits for it."""
    found: list[list[Event]] = [[]]
    for event in sorted(events, key=lambda event: event.index):
        found[-1].append(event)
        if event.waited is not None:
            found.append([])
    return [backward for backward in found if backward]
