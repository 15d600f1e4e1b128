"""The loss of every rank, or of every setting, as it trains: lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from matplotlib.ticker import MaxNLocator

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import (
    LEADER,
    NAME_HEIGHT,
    Picture,
    name_lines,
    open_picture,
    read_named,
    read_ranks,
    table,
)
from ddp_kit.plot.style import PAPER, edge_color, fold, marker, rank_color, series_color

LEFT, TOP, WIDE, TALL = 0.72, 0.42, 5.9, 2.9  # inches
MOST_MARKERS = 12  # points of a line; above, only its end is marked
CLOSE = 0.02  # of the height of all lines: closer than this, one line hides the other
DASH = 3.5  # points of each rank's colour in one period where all lines coincide


def losses(
    result: Iterable[Sequence[float]] | Mapping[str, Sequence[float]],
    title: str | None = None,
    xlabel: str = "epoch",
    ylabel: str = "training loss",
) -> Picture:
    """Draw one line of losses per rank; lines that coincide show all their colours.

    result[rank] is a sequence of numbers (a list, a 1-d tensor), the first one at x = 1;
    lengths may differ. Or result maps the names of what is compared, such as "4 ranks", to such
    sequences: then the lines have those names, and no colour of a rank.

    The caption names the first loss of each line that is NaN or infinite, and so cannot be drawn.
    Raises PlotError if the result, or one of its sequences, is empty or is not a sequence of
    numbers.
    """
    if isinstance(result, Mapping):
        of, given = "", read_named("result", result, "each name to a list of losses")
        lines = {str(name): _read(f"{name!r} must be", value) for name, value in given.items()}
        fills = edges = [series_color(i) for i in range(len(lines))]
    else:
        of, ranks = " of each rank", range(len(values := read_ranks(result)))
        lines = {f"rank {r}": _read(f"rank {r} must return", values[r]) for r in ranks}
        fills, edges = [rank_color(r) for r in ranks], [edge_color(r) for r in ranks]
    if title is None:
        title = f"{ylabel[:1].upper()}{ylabel[1:]}{of}, {xlabel} by {xlabel}"
    rows = [[name, f"{y[0]:.2f}", f"{y[-1]:.2f}"] for name, y in lines.items()]
    text_table = table(title, ["", f"first {xlabel}", f"last {xlabel}"], rows)

    height = max(TALL, NAME_HEIGHT * len(lines))
    ends = [_note_end(name, y, xlabel) for name, y in lines.items()]
    caption = fold(" ".join(filter(None, ends)), LEFT + WIDE)
    right = max(0.85, LEADER + 0.15 + 0.076 * max(map(len, lines)))
    size = LEFT + WIDE + right, TOP + height + 0.5
    picture, _ = open_picture(title, text_table, *size, caption)
    ax = picture.chart(LEFT, TOP, WIDE, height, "y", xlabel, ylabel)
    dashed = _some_meet(list(lines.values()))
    for i, (name, y) in enumerate(lines.items()):
        _line(ax, i, name, y, len(lines), fills[i], edges[i], dashed)
    longest = max(map(len, lines.values()))
    margin = 0.03 * (longest - 1) or 0.5
    ax.set_xlim(1 - margin, longest + margin)
    ax.margins(y=0.07)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6))
    ax.ticklabel_format(axis="y", useOffset=False)
    name_lines(ax, list(lines), [_end(ax, y, longest + margin) for y in lines.values()], edges)
    return picture


def _read(who: str, value: Sequence[float]) -> list[float]:
    try:
        numbers = value.tolist() if hasattr(value, "tolist") else list(value)
        numbers = [float(n.tolist() if hasattr(n, "tolist") else n) for n in numbers]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if not numbers:
        raise PlotError(f"{who} a sequence of losses, got {value!r}")
    return numbers


def _some_meet(lines: Sequence[list[float]]) -> bool:
    """Return whether two lines are somewhere so close that one would hide the other."""
    finite = [loss for y in lines for loss in y if math.isfinite(loss)]
    near = CLOSE * (max(finite) - min(finite)) if finite else 0.0
    return any(
        abs(a - b) <= near for ys in combinations(lines, 2) for a, b in zip(*ys, strict=False)
    )


def _line(
    ax, i: int, name: str, y: list[float], total: int, color: str, edge: str, dashed: bool
) -> None:
    """Draw the i-th of the lines: a hairline and, over it, dashes or a solid line.

    Line i is drawn for (total - i) of the `total` parts of a period: where lines coincide, each
    later one covers one part less of the ones below, and all colours show in equal shares.
    """
    x = range(1, len(y) + 1)
    ax.plot(x, y, color=edge, linewidth=0.8, linestyle="-", marker="", zorder=2)
    widest = 9 if len(y) > 1 else 14  # with no line, the markers alone must show
    on, off = DASH * (total - i), DASH * i
    dashes = (0, (on / 2.2, off / 2.2)) if i and dashed else "-"
    style = {"color": color, "linewidth": 2.2, "linestyle": dashes, "dash_capstyle": "butt"}
    # Smaller for later lines, so that earlier ones show behind them.
    marks = {"marker": marker(i), "markersize": widest - (widest - 5.5) * i / max(1, total - 1)}
    marks |= {"markeredgecolor": PAPER if edge == color else edge, "markeredgewidth": 0.6}
    marks |= {"markevery": 1 if len(y) <= MOST_MARKERS else [len(y) - 1]}
    ax.plot(x, y, label=name, zorder=3 + i / 100, **style, **marks)


def _note_end(name: str, y: list[float], xlabel: str) -> str:
    """Return from where on the losses of a line cannot be drawn; "" if all can."""
    bad = next((x for x, loss in enumerate(y, start=1) if not math.isfinite(loss)), None)
    return "" if bad is None else f"{name[:1].upper()}{name[1:]}: {y[bad - 1]:g} in {xlabel} {bad}."


def _end(ax, y: list[float], right: float) -> tuple[float, float]:
    """Return where the line to the name begins: at the last point, or right of one not drawn."""
    if math.isfinite(y[-1]):
        return len(y), y[-1]
    finite = [loss for loss in y if math.isfinite(loss)]
    return right, finite[-1] if finite else ax.get_ylim()[0]
