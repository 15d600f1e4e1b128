"""What a collective costs as the message grows: lines, and their ratio."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ddp_kit.plot.labels import LEADER, name_lines
from ddp_kit.plot.numbers import significant, size, table
from ddp_kit.plot.picture import Picture, label_axes
from ddp_kit.plot.style import (
    PAPER,
    fold,
    marker,
    series_color,
    write,
)

LEFT, TOP, WIDE, TALL, GAP, SMALL = 0.78, 0.42, 5.9, 2.5, 0.22, 1.15  # inches


def bandwidth(
    series: Mapping[str, Iterable[tuple[int, float]]], title: str | None = None
) -> Picture:
    """Draw time against message size for each series, and each as a ratio to the first.

    series maps a name to pairs (nbytes, seconds), one pair a size. Both axes are
    logarithmic; time is drawn in milliseconds. With two series or more, a second panel shows
    how many times the first series each of the others takes, at the sizes both have.

    ValueError if there is no series, a series is empty or measures a size twice, or a number
    is not positive.
    """
    points = {name: _read(name, pairs) for name, pairs in series.items()}
    if not points:
        raise ValueError("series is empty: there is nothing to draw")
    if title is None:
        title = "Time of one call by message size"
    sizes = sorted(set().union(*points.values()))
    rows = [
        [f"{n:,.0f}", *(significant(p[n]) if n in p else "\N{EN DASH}" for p in points.values())]
        for n in sizes
    ]
    twin = table(f"{title} (ms)", ["bytes", *points], rows)

    names = ["\n".join(fold(name, 1.6, 9)) for name in points]
    right = LEADER + 0.15 + 0.076 * max(len(line) for name in names for line in name.split("\n"))
    compare = len(points) > 1
    height = TOP + TALL + (GAP + SMALL if compare else 0) + 0.55
    picture = Picture(LEFT + WIDE + right, height, twin)
    write(picture.sheet(), 0.02, 0.12, title, 11.5, weight="bold")
    ax = picture.chart(LEFT, TOP, WIDE, TALL, grid="both")
    ax.set(xscale="log", yscale="log")
    for i, times in enumerate(points.values()):
        _line(ax, i, times)
    _sizes(ax, sizes)
    _logarithmic(ax.yaxis, [time for times in points.values() for time in times.values()])
    label_axes(ax, "" if compare else "message size (bytes)", "time (ms)")
    ends = [list(times.items())[-1] for times in points.values()]
    name_lines(ax, names, ends, [series_color(i) for i in range(len(ends))])
    if compare:
        ax.tick_params(axis="x", labelbottom=False)
        below = picture.chart(LEFT, TOP + TALL + GAP, WIDE, SMALL, grid="both")
        _ratios(below, list(points.values()))
        _sizes(below, sizes)
        label_axes(below, "message size (bytes)", "times\nthe first")
    return picture


def _read(name: str, pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return milliseconds by number of bytes, in order of size."""
    times: dict[int, float] = {}
    for nbytes, seconds in pairs:
        if not nbytes > 0 or not 0 < seconds < math.inf:
            raise ValueError(f"{name!r} has {seconds} seconds for {nbytes} bytes: must be positive")
        if nbytes in times:
            raise ValueError(f"{name!r} measures {nbytes} bytes twice: give one time a size")
        times[nbytes] = 1000 * seconds
    if not times:
        raise ValueError(f"{name!r} has no point")
    return dict(sorted(times.items()))


def _line(ax, index: int, values: dict[int, float]) -> None:
    ax.plot(
        list(values),
        list(values.values()),
        color=series_color(index),
        linewidth=1.6,
        linestyle="-",
        marker=marker(index),
        markersize=6,
        markeredgecolor=PAPER,
        markeredgewidth=0.6,
        zorder=3,
    )


def _sizes(ax, sizes: list[int]) -> None:
    """Mark the sizes that were measured, as many as have room for their names."""
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    margin = 0.04 * (high - low) or 0.5
    ticks: list[int] = []
    for n in sizes:
        if not ticks or math.log(n / ticks[-1]) >= 0.1 * (high - low):
            ticks.append(n)
    ax.set_xlim(math.exp(low - margin), math.exp(high + margin))
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))


def _logarithmic(axis, values: list[float]) -> None:
    low, high = min(values), max(values)
    margin = 0.06 * math.log(high / low) or 0.5
    axis.axes.set_ylim(low * math.exp(-margin), high * math.exp(margin))
    if high / low > 8:
        ticks = LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0))
    else:  # too narrow for 1, 2, 5: at even steps
        ticks = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(ticks)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _ratios(ax, points: list[dict[int, float]]) -> None:
    first = points[0]
    ax.set(xscale="log", yscale="log")
    ax.axhline(1, color=series_color(0), linewidth=1.2, linestyle="-", zorder=2)
    shown = [1 / 1.3, 1.3]
    for i, times in enumerate(points[1:], start=1):
        ratio = {n: time / first[n] for n, time in times.items() if n in first}
        if ratio:
            _line(ax, i, ratio)
            shown += ratio.values()
    _logarithmic(ax.yaxis, shown)
