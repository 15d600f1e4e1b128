"""What more ranks cost: lines for what a model predicts, marks for what somebody measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MultipleLocator, NullLocator

from ddp_kit.plot.labels import LEADER, name_lines
from ddp_kit.plot.numbers import significant, table
from ddp_kit.plot.picture import Picture, label_axes
from ddp_kit.plot.style import INK, PAPER, fold, marker, series_color, write

LEFT, TOP, WIDE, TALL, ROW = 0.78, 0.42, 5.6, 3.1, 0.22  # inches
Pairs = Iterable[tuple[int, float]]
Series = dict[str, dict[int, float]]


def scaling(
    predicted: Mapping[str, Pairs],
    measured: Mapping[str, Pairs] | None = None,
    published: Mapping[str, Pairs] | None = None,
    efficiency: bool = False,
    title: str | None = None,
) -> Picture:
    """Draw seconds or efficiency against the number of ranks, and say who predicted or measured.

    Each argument maps a name to pairs of ranks and seconds, or with `efficiency` to pairs of
    ranks and a share of 1. predicted: lines. measured: filled marks, in the colour of the line of
    the same name. published: hollow marks, named below. Both axes are logarithmic, but that of
    an efficiency; seconds are drawn in milliseconds.

    ValueError if nothing is predicted, a series has no point or one of them twice, or a number
    is not positive.
    """
    unit, factor = ("%", 100) if efficiency else ("ms", 1000)
    groups = {
        kind: {name: _read(name, pairs, factor) for name, pairs in (series or {}).items()}
        for kind, series in [("", predicted), ("measured", measured), ("published", published)]
    }
    lines, dots, others = groups.values()
    if not lines:
        raise ValueError("predicted is empty: there is no line to draw")
    if title is None:
        title = "Efficiency by number of ranks" if efficiency else "Time by number of ranks"

    names = ["\n".join(fold(name, 1.6, 9)) for name in lines]
    right = LEADER + 0.15 + 0.076 * max(len(line) for name in names for line in name.split("\n"))
    below = 0.62 + ROW * (1 + len(others))
    picture = Picture(LEFT + WIDE + right, TOP + TALL + below, _twin(title, unit, groups))
    sheet = picture.sheet()
    write(sheet, 0.02, 0.12, title, 11.5, weight="bold")
    ax = picture.chart(LEFT, TOP, WIDE, TALL, grid="both")
    colors = {name: series_color(i) for i, name in enumerate([*lines, *(dots.keys() - lines)])}
    for name, points in lines.items():
        ax.plot(list(points), list(points.values()), color=colors[name], linewidth=1.6, zorder=2)
    for name, points in dots.items():
        _marks(ax, points, list(colors).index(name), colors[name], colors[name])
    for i, points in enumerate(others.values()):
        _marks(ax, points, i, PAPER, INK)
    _scale(ax, [points for group in groups.values() for points in group.values()], efficiency)
    label_axes(ax, "ranks", "efficiency (%)" if efficiency else "time (ms)")
    ends = [list(points.items())[-1] for points in lines.values()]
    name_lines(ax, names, ends, [colors[name] for name in lines])
    _key(sheet, TOP + TALL + 0.66, bool(dots), list(others))
    return picture


def _read(name: str, pairs: Pairs, factor: float) -> dict[int, float]:
    """Return percent or milliseconds by number of ranks, in order."""
    values: dict[int, float] = {}
    for ranks, value in pairs:
        if not ranks > 0 or not 0 < value < math.inf:
            raise ValueError(f"{name!r} has {value} for {ranks} ranks: must be positive")
        if ranks in values:
            raise ValueError(f"{name!r} has {ranks} ranks twice: give one number each")
        values[ranks] = factor * value
    if not values:
        raise ValueError(f"{name!r} has no point")
    return dict(sorted(values.items()))


def _twin(title: str, unit: str, groups: dict[str, Series]) -> str:
    columns = {
        f"{name}, {kind}" if kind else name: points
        for kind, series in groups.items()
        for name, points in series.items()
    }
    rows = [
        [f"{n:,}", *(significant(p[n]) if n in p else "\N{EN DASH}" for p in columns.values())]
        for n in sorted(set().union(*columns.values()))
    ]
    return table(f"{title} ({unit})", ["ranks", *columns], rows)


def _marks(ax: Axes, points: dict[int, float], index: int, face: str, edge: str) -> None:
    style = {"marker": marker(index), "markersize": 7, "linestyle": "", "zorder": 4}
    rim = {"markerfacecolor": face, "markeredgecolor": PAPER if face == edge else edge}
    ax.plot(list(points), list(points.values()), **style, **rim, markeredgewidth=1.2)


def _scale(ax: Axes, drawn: list[dict[int, float]], efficiency: bool) -> None:
    ranks = sorted(set().union(*drawn))
    values = [value for points in drawn for value in points.values()]
    ax.set(xscale="log", xlim=(ranks[0] / 1.15, ranks[-1] * 1.15))
    powers = range(math.floor(math.log2(ranks[0])), 1 + math.ceil(math.log2(ranks[-1])))
    step = 1 + len(powers) // 13
    ticks = [2**p for p in powers[::step] if ranks[0] <= 2**p <= ranks[-1]] or [ranks[0]]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if efficiency:
        ax.set_ylim(0, 1.06 * max(100, *values))
        ax.yaxis.set_major_locator(MultipleLocator(20))
        return
    low, high = min(values), max(values)
    margin = 0.06 * math.log(high / low) or 0.5
    ax.set(yscale="log", ylim=(low * math.exp(-margin), high * math.exp(margin)))
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    )


def _key(sheet: Axes, y: float, measured: bool, published: list[str]) -> None:
    """Say which is which, in a row below the chart, and name what was published."""
    x = LEFT
    sheet.plot([x, x + 0.3], [y, y], color=INK, linewidth=1.6)
    write(sheet, x + 0.38, y, "line: predicted", 8.5)
    if measured:
        _marks(sheet, {x + 1.9: y}, 0, INK, INK)
        write(sheet, x + 2.05, y, "filled: measured here", 8.5)
    for i, name in enumerate(published):
        at = y + ROW * (1 + i)
        _marks(sheet, {x + 0.15: at}, i, PAPER, INK)
        write(sheet, x + 0.38, at, f"hollow: published, {name}", 8.5)
