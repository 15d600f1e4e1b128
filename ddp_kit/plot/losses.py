"""The loss of every rank as it trains: lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from matplotlib.ticker import MaxNLocator

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import NAME_HEIGHT, Picture, name_lines, open_picture, read_ranks, table
from ddp_kit.plot.style import PAPER, edge_color, fold, marker, rank_color

LEFT, TOP, WIDE, TALL = 0.72, 0.42, 5.9, 2.9  # inches
MOST_MARKERS = 12  # points of a line; above, only its end is marked
DASH = 3.5  # points of each rank's colour in one period where all lines coincide


def losses(
    result: Iterable[Sequence[float]],
    title: str | None = None,
    xlabel: str = "epoch",
    ylabel: str = "training loss",
) -> Picture:
    """Draw one line of losses per rank; lines that coincide show all their colours.

    result[rank] is a sequence of numbers (a list, a 1-d tensor), the first one at x = 1;
    lengths may differ. The caption names the first loss of each rank that is NaN or infinite, and
    so cannot be drawn. Raises PlotError if the result, or one rank's sequence, is empty or is not
    a sequence of numbers.
    """
    lines = [_read(rank, value) for rank, value in enumerate(read_ranks(result))]
    if title is None:
        title = f"{ylabel[:1].upper()}{ylabel[1:]} of each rank, {xlabel} by {xlabel}"
    rows = [[f"rank {r}", f"{y[0]:.2f}", f"{y[-1]:.2f}"] for r, y in enumerate(lines)]
    text_table = table(title, ["", f"first {xlabel}", f"last {xlabel}"], rows)

    height = max(TALL, NAME_HEIGHT * len(lines))
    ends = [_note_end(rank, y, xlabel) for rank, y in enumerate(lines)]
    caption = fold(" ".join(filter(None, ends)), LEFT + WIDE)
    size = LEFT + WIDE + 0.85, TOP + height + 0.5
    picture, _ = open_picture(title, text_table, *size, caption)
    ax = picture.chart(LEFT, TOP, WIDE, height, "y", xlabel, ylabel)
    for rank, y in enumerate(lines):
        _line(ax, rank, y, len(lines))
    longest = max(map(len, lines))
    margin = 0.03 * (longest - 1) or 0.5
    ax.set_xlim(1 - margin, longest + margin)
    ax.margins(y=0.07)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6))
    ax.ticklabel_format(axis="y", useOffset=False)
    names = [f"rank {rank}" for rank in range(len(lines))]
    name_lines(ax, names, [_end(ax, y) for y in lines], [edge_color(r) for r in range(len(lines))])
    return picture


def _read(rank: int, value: Sequence[float]) -> list[float]:
    try:
        numbers = value.tolist() if hasattr(value, "tolist") else list(value)
        numbers = [float(n.tolist() if hasattr(n, "tolist") else n) for n in numbers]
    except (TypeError, ValueError):
        numbers = []
    if not numbers:
        raise PlotError(f"rank {rank} must return a sequence of losses, got {value!r}")
    return numbers


def _line(ax, rank: int, y: list[float], ranks: int) -> None:
    """Draw a hairline and dashes over it.

    Rank r is drawn for (ranks - r) of the `ranks` parts of a period: where lines coincide, each
    higher rank covers one part less of the ones below, and all colours show in equal shares.
    """
    color, edge = rank_color(rank), edge_color(rank)
    x = range(1, len(y) + 1)
    ax.plot(x, y, color=edge, linewidth=0.8, linestyle="-", marker="", zorder=2)
    widest = 9 if len(y) > 1 else 14  # with no line, the markers alone must show
    on, off = DASH * (ranks - rank), DASH * rank
    dashes = (0, (on / 2.2, off / 2.2)) if rank else "-"
    style = {"color": color, "linewidth": 2.2, "linestyle": dashes, "dash_capstyle": "butt"}
    # Smaller for higher ranks, so that lower ones show behind them.
    marks = {
        "marker": marker(rank),
        "markersize": widest - (widest - 5.5) * rank / max(1, ranks - 1),
    }
    marks |= {"markeredgecolor": PAPER if edge == color else edge, "markeredgewidth": 0.6}
    marks |= {"markevery": 1 if len(y) <= MOST_MARKERS else [len(y) - 1]}
    ax.plot(x, y, label=f"rank {rank}", zorder=3 + rank / 100, **style, **marks)


def _note_end(rank: int, y: list[float], xlabel: str) -> str:
    """Return from where on a rank's losses cannot be drawn; "" if all can."""
    bad = next((x for x, loss in enumerate(y, start=1) if not math.isfinite(loss)), None)
    return "" if bad is None else f"Rank {rank}: {y[bad - 1]:g} in {xlabel} {bad}."


def _end(ax, y: list[float]) -> tuple[float, float]:
    """Return the last point that can be drawn; a loss may have gone to infinity."""
    finite = [(x, loss) for x, loss in enumerate(y, start=1) if math.isfinite(loss)]
    return finite[-1] if finite else (len(y), ax.get_ylim()[0])
