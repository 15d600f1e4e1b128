"""One step of a ring all-reduce: what every rank holds, and the messages that brought it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from ddp_kit.failures import count
from ddp_kit.plot.numbers import size, table
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.ring import fill, outline, read, step_names
from ddp_kit.plot.style import (
    PAPER,
    QUIET,
    box,
    chip,
    edge_color,
    fold,
    rank_color,
    text_color,
    write,
)
from ddp_kit.trace import Trace

LEFT, TOP, TALL, GAP = 0.8, 0.75, 0.34, 0.3  # inches; the gap is an arrow's length
MOST = 8  # ranks; above, the numbers do not fit


def ring_step(result: Sequence[Any], step: int) -> Picture:
    """Draw what every rank holds after one step of a chunked ring all-reduce.

    result: of a run whose ranks return what `ring` takes, and whose trace has the messages of the
        ring and no others: each rank's message number `step` belongs to that step.
    step: 0 is before the first one.

    An arrow is a message of the trace, in the colour of the rank that sent it; it ends at the
    chunk that changed. ValueError as in `ring`, and for a step that the ring does not have or more
    than 8 ranks. TypeError without a trace.
    """
    held = read(list(result))
    n, names = len(held), step_names(len(held))
    if not 0 <= step < len(names):
        raise ValueError(f"step must be from 0 to {len(names) - 1}, got {step}")
    if n > MOST:
        raise ValueError(f"a step can be drawn on at most {MOST} ranks, got {n}")
    trace = getattr(result, "trace", None)
    if not isinstance(trace, Trace):
        raise TypeError(f"needs a result with a .trace, got {result!r}")
    changed = [[step > 0 and rank[step][c] != rank[step - 1][c] for c in range(n)] for rank in held]
    came = {}  # by receiver
    for src in range(n) if step else ():
        sent = trace.messages(src=src)[step - 1]
        came[sent.dst] = sent
    title = f"Ring all-reduce on {count(n, 'rank')}, "
    title += f"step {step} of {len(names) - 1}: {names[step]}" if step else "before the first step"
    rows = [
        [
            f"rank {r}",
            " ".join(f"{v}{'*' * c}" for v, c in zip(held[r][step], changed[r], strict=True)),
            f"{came[r].nbytes} B from rank {came[r].src}" if r in came else "-",
        ]
        for r in range(n)
    ]
    twin = table(title, ["", "chunks", "received"], rows, align="<")

    wide = 0.09 * n + 0.3
    width = max(LEFT + n * wide + 1.6, 6.0)
    said = "Columns are chunks. A number's digits name the ranks in it."
    said += " An arrow is a message of the trace." if n > 1 else ""
    caption = fold(said, width)
    below = TOP + n * (TALL + GAP)
    picture = Picture(width, below + 0.1 + 0.17 * len(caption), twin)
    ax = picture.sheet()
    write(ax, 0, 0.12, title, 11.5, weight="bold")
    for r in range(n):
        y = TOP + r * (TALL + GAP)
        chip(ax, 0, y + TALL / 2 - 0.11, 0.6, 0.22, r, f"rank {r}")
        for c in range(n):
            value, x = held[r][step][c], LEFT + c * wide
            color = fill(value, n)
            box(ax, x, y, wide, TALL, color, PAPER, linewidth=1)
            middle = (x + wide / 2, y + TALL / 2)
            write(ax, *middle, str(value), 9, color=text_color(color), ha="center")
            if changed[r][c] and r in came:
                outline(ax, x, y, wide, TALL, rank_color(came[r].src))
                _arrow(ax, x + wide / 2, y, came[r].src)
                if came[r].src > r:  # it leaves the last row, and comes in above the first
                    _stub(ax, x + wide / 2, TOP + came[r].src * (TALL + GAP) + TALL, came[r].src)
        if r in came:
            text = f"{size(came[r].nbytes)} from rank {came[r].src}"
            write(ax, LEFT + n * wide + 0.15, y + TALL / 2, text, 8.5, color=QUIET)
    for i, line in enumerate(caption):
        write(ax, 0, below + 0.1 + 0.17 * i, line, 8.5, color=QUIET)
    return picture


def _arrow(ax: Axes, x: float, y: float, src: int) -> None:
    style = {"color": edge_color(src), "linewidth": 1.6, "arrowstyle": "-|>"}
    style |= {"mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (x, y), (x, y - GAP + 0.02), arrowprops=style)


def _stub(ax: Axes, x: float, y: float, src: int) -> None:
    ax.plot([x, x], [y, y + GAP - 0.08], color=edge_color(src), linewidth=1.6, linestyle=":")
