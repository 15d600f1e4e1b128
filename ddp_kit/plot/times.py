"""How long communication takes, by message size or by number of ranks: bandwidth, scaling."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from statistics import quantiles
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import (
    LARGEST,
    LEADER,
    Picture,
    name_lines,
    open_picture,
    plain,
    read_named,
    read_numbers,
    table,
)
from ddp_kit.plot.style import (
    DASHES,
    INK,
    NOTHING,
    PAPER,
    TIMES,
    byte_size,
    fold,
    marker,
    series_color,
    significant,
    write,
)

LEFT, TOP = 0.78, 0.42  # inches
Pairs = Iterable[tuple[int, float]]
Series = dict[str, dict[int, float]]


def bandwidth(
    series: Mapping[str, Iterable[tuple[int, float | Sequence[float]]]],
    title: str | None = None,
    model: Mapping[str, Pairs] | None = None,
    only: Iterable[str] | None = None,
    dashed: Mapping[str, str] | None = None,
    residuals: bool = False,
) -> Picture:
    """Draw time against tensor size for each series, and each as a ratio to the first.

    series maps a name to pairs (nbytes, seconds), one pair per size. In place of seconds there may
    be a list of samples: their median is drawn, with a thin bar from the first to the third
    quartile. Both axes are logarithmic; time is drawn in milliseconds. With two or more series, a
    second panel shows how many times as long as the first series each of the others takes, at the
    sizes both have.
    model: maps names of series to pairs (nbytes, seconds), which are drawn as dashed lines.
    only: the names of the series to draw, by default all; each keeps its colour and its marker.
    dashed: maps names of series that are drawn as dashed lines to the series whose colour and
    marker they share; models are then dotted. residuals: the second panel shows how many times as
    long as its model each series takes, instead.

    Raises PlotError if there is no series, a series is empty or has a size twice, a number or a
    sample is not positive and finite, `model`, `only` or `dashed` has a name that is no series, or
    the model that `residuals` needs is missing at a size.
    """
    read_named("series", series, "each name to pairs (nbytes, seconds)")
    dashed = dict(dashed or {})
    order = [name for name in series if name not in dashed]
    if set(dashed) - set(series) or set(dashed.values()) - set(order):
        known = f"names of series ({', '.join(series)}) to series that are not dashed"
        raise PlotError(f"dashed must map {known}, got {dashed}")
    looks = {name: order.index(dashed.get(name, name)) for name in series}
    chosen = list(series if only is None else only)
    if not chosen or set(chosen) - set(series):
        raise PlotError(f"only must have names of series ({', '.join(series)}), got {chosen}")
    low: Series = {}
    points: Series = {}
    high: Series = {}
    many = False
    for name, pairs in series.items():
        if name not in chosen:
            continue
        samples = _read(name, pairs, "bytes")
        many = many or any(len(each) > 1 for each in samples.values())
        quarters = {n: _quartiles(each) for n, each in samples.items()}
        for i, line in enumerate((low, points, high)):
            line[name] = {n: 1000 * times[i] for n, times in quarters.items()}
    modelled = {}
    if model:
        read_named("model", model, "names of series to pairs (nbytes, seconds)")
        for name, pairs in model.items():
            if name not in points:
                raise PlotError(f"model has {name!r}, but the series are {', '.join(points)}")
            modelled[name] = _points(f"{name}, model", pairs, "bytes", 1000)
    title = "Time of one call by tensor size" if title is None else title
    wide, tall, gap, small = 5.9, 2.5, 0.22, 1.15  # inches
    names, right = _names(points)
    if residuals and any(set(points[name]) - set(modelled.get(name, ())) for name in points):
        raise PlotError("residuals need a model of each series that is drawn, at each size")
    compare = len(points) > 1 or residuals
    height = TOP + tall + (gap + small if compare else 0) + 0.55
    sizes = sorted(set().union(*points.values()))
    columns = points | {
        f"{name}, model": {n: time for n, time in line.items() if n in sizes}
        for name, line in modelled.items()
    }
    text_table = _table(f"{title} (ms)", "bytes", columns)
    notes = ["Thin bar: from the first to the third quartile."] * many
    caption = " ".join(notes + [f"{'Dotted' if dashed else 'Dashed'}: the model."] * bool(modelled))
    size = LEFT + wide + right, height
    picture, _ = open_picture(title, text_table, *size, fold(caption, size[0]))
    xlabel = "size of the tensor"  # each tick has its unit
    ax = picture.chart(LEFT, TOP, wide, tall, "both", "" if compare else xlabel, "time (ms)")
    lines = [*low.values(), *high.values(), *modelled.values()]
    _log_log(ax, sizes, [time for times in lines for time in times.values()])
    for name, times in points.items():
        _line(ax, looks[name], times, name in dashed)
        style = {"color": series_color(looks[name]), "marker": "", "zorder": 2.5}
        for n in times if many else ():
            ax.plot([n, n], [low[name][n], high[name][n]], linewidth=1.1, linestyle="-", **style)
        if name in modelled:
            style |= {"linewidth": 1.4, "linestyle": (0, (1, 1.3) if dashed else (4, 2))}
            ax.plot(list(modelled[name]), list(modelled[name].values()), **style)
    name_lines(ax, names, _ends(points), [series_color(looks[name]) for name in points])
    if compare:
        ax.tick_params(axis="x", labelbottom=False)
        base, *others = points
        bases = modelled if residuals else dict.fromkeys(others, points[base])
        ratio = "\n".join(fold(f"{TIMES} {'the model' if residuals else base}", 1.15))
        below = picture.chart(LEFT, TOP + tall + gap, wide, small, "both", xlabel, ratio)
        ratios = {
            o: {n: t / b[n] for n, t in points[o].items() if n in b} for o, b in bases.items()
        }
        shown = [ratio for line in ratios.values() for ratio in line.values()]
        _log_log(below, sizes, [1 / 1.3, 1.3, *shown])
        if residuals and max(shown) > 3 * min(shown):  # so that ticks are below 1, too
            below.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        _tick_at_one(below)
        color = INK if residuals else series_color(looks[base])
        below.axhline(1, color=color, linewidth=1.2, linestyle="-", zorder=2)
        for name, line in ratios.items():
            _line(below, looks[name], line, name in dashed)
    return picture


def scaling(
    predicted: Mapping[str, Pairs],
    measured: Mapping[str, Pairs] | None = None,
    published: Mapping[str, Pairs] | None = None,
    efficiency: bool = False,
    title: str | None = None,
    order: Iterable[str] = (),
) -> Picture:
    """Draw seconds or efficiency against the number of ranks: predicted, measured, published.

    The first three map a name to pairs of ranks and seconds or, with `efficiency`, to pairs of
    ranks and a share of 1. predicted: lines. measured: filled marks, in the colour of the line of
    the same name. published: hollow marks, named below, in the colour of the line whose name is
    the beginning of theirs. order: names in the order of their colours, so that several pictures
    agree. Both axes are logarithmic, except an efficiency's; seconds are drawn in milliseconds.

    Raises PlotError if nothing is predicted, a series has no points or one of them twice, or a
    number is not positive.
    """
    unit, factor = ("%", 100) if efficiency else ("ms", 1000)
    named = {"predicted": predicted, "measured": measured, "published": published}
    groups: dict[str, Series] = {}
    for kind, series in named.items():
        if series or kind == "predicted":
            read_named(kind, series, "each name to pairs of ranks and a number")
        pairs = (series or {}).items()
        groups[kind] = {name: _points(name, given, "ranks", factor) for name, given in pairs}
    lines, dots, others = groups.values()
    columns = dict(lines)
    columns |= {f"{name}, measured": points for name, points in dots.items()}
    columns |= {f"{name}, published": points for name, points in others.items()}
    if title is None:
        title = "Efficiency by number of ranks" if efficiency else "Time by number of ranks"
    wide, tall, row = 5.6, 3.1, 0.22  # inches
    names, right = _names(lines)
    height = TOP + tall + (0.62 + row * (1 + len(others)))
    text_table = _table(f"{title} ({unit})", "ranks", columns)
    picture, sheet = open_picture(title, text_table, LEFT + wide + right, height)
    ylabel = "efficiency (%)" if efficiency else "time (ms)"
    ax = picture.chart(LEFT, TOP, wide, tall, "both", "ranks", ylabel)
    colors = {n: series_color(i) for i, n in enumerate(dict.fromkeys([*order, *lines, *dots]))}
    for name, points in lines.items():
        ax.plot(list(points), list(points.values()), color=colors[name], linewidth=1.6, zorder=2)
    for name, points in dots.items():
        _marks(ax, points, list(colors).index(name), colors[name], colors[name])
    _rank_axes(ax, list(columns.values()), efficiency)
    name_lines(ax, names, _ends(lines), [colors[name] for name in lines])

    y = TOP + tall + 0.66
    sheet.plot([LEFT, LEFT + 0.3], [y, y], color=INK, linewidth=1.6)
    write(sheet, LEFT + 0.38, y, "line: predicted", 8.5)
    if dots:
        _marks(sheet, {LEFT + 1.9: y}, 0, INK, INK)
        write(sheet, LEFT + 2.05, y, "filled: measured here", 8.5)
    for i, (name, points) in enumerate(others.items()):
        at, rim = y + row * (1 + i), next((colors[n] for n in lines if name.startswith(n)), INK)
        _marks(ax, points, i, PAPER, rim)
        _marks(sheet, {LEFT + 0.15: at}, i, PAPER, rim)
        write(sheet, LEFT + 0.38, at, f"hollow: published, {name}", 8.5)
    return picture


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and 0 < value < LARGEST


def _quartiles(values: list[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return quantiles(values, method="inclusive") if len(values) > 1 else values * 3


def _read(name: str, pairs: Any, unit: str) -> dict[int, list[float]]:
    """Return the values of one series by what the first number of a pair counts, in its order.

    unit: "bytes" or "ranks".
    """
    try:
        given = [(plain(at), read_numbers(values)) for at, values in pairs]
    except (TypeError, ValueError):
        raise PlotError(f"{name!r} must have pairs ({unit}, number), got {pairs!r}") from None
    found: dict[int, list[float]] = {}
    for at, values in given:
        for value in values:
            if not _is_positive(at) or not _is_positive(value):
                raise PlotError(
                    f"{name!r} has {value!r} for {at!r} {unit}: both must be positive and finite"
                )
        if not values:
            raise PlotError(f"{name!r} has no samples for {at!r} {unit}")
        if at in found:
            raise PlotError(f"{name!r} has {at} {unit} twice: give one value for each number")
        found[at] = values
    if not found:
        raise PlotError(f"{name!r} has no points")
    return dict(sorted(found.items()))


def _points(name: str, pairs: Pairs, unit: str, factor: float) -> dict[int, float]:
    """Return the points of one series in order, with `factor` times each value."""
    found = _read(name, pairs, unit)
    for at, values in found.items():
        if len(values) > 1:
            raise PlotError(f"{name!r} has {len(values)} values for {at} {unit}: give one")
    return {at: factor * value for at, (value,) in found.items()}


def _table(title: str, first: str, columns: Series) -> str:
    rows = [
        [f"{n:,.0f}", *(significant(p[n]) if n in p else NOTHING for p in columns.values())]
        for n in sorted(set().union(*columns.values()))
    ]
    return table(title, [first, *columns], rows)


def _names(lines: Series) -> tuple[list[str], float]:
    """Return the names of lines, folded, and the inches they take to the right of the chart."""
    names = ["\n".join(fold(name, 1.6, 9)) for name in lines]
    longest = max(len(line) for name in names for line in name.split("\n"))
    return names, LEADER + 0.15 + 0.076 * longest


def _ends(lines: Series) -> list[tuple[int, float]]:
    return [list(points.items())[-1] for points in lines.values()]


def _line(ax: Axes, index: int, values: dict[int, float], dashed: bool) -> None:
    color = series_color(index)
    style = {"color": color, "linewidth": 1.6, "linestyle": DASHES if dashed else "-", "zorder": 3}
    style |= {"marker": marker(index), "markersize": 6, "markeredgecolor": PAPER}
    style |= {"markeredgewidth": 0.6}
    if dashed:
        style |= {"markerfacecolor": PAPER, "markeredgecolor": color, "markeredgewidth": 1.2}
    ax.plot(list(values), list(values.values()), **style)


def _marks(ax: Axes, points: dict[int, float], index: int, face: str, edge: str) -> None:
    style = {"marker": marker(index), "markersize": 7, "linestyle": "", "zorder": 4}
    rim = {"markerfacecolor": face, "markeredgecolor": PAPER if face == edge else edge}
    ax.plot(list(points), list(points.values()), **style, **rim, markeredgewidth=1.2)


def _log_log(ax: Axes, sizes: list[int], values: list[float]) -> None:
    """Make both axes logarithmic, with as many of the sizes named as there is room for."""
    ax.set(xscale="log", yscale="log")
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    margin = 0.04 * (high - low) or 0.5
    ticks = sorted({sizes[0], sizes[-1]})  # these always
    for n in sizes:
        if all(abs(math.log(n / at)) >= 0.1 * (high - low) for at in ticks):
            ticks = sorted([*ticks, n])
    ax.set_xlim(math.exp(low - margin), math.exp(high + margin))
    _ticks(ax.xaxis, ticker.FixedLocator(ticks), functools.partial(byte_size, digits=3))
    locator, ratio = _log_limits(ax, values)
    if ratio <= 8:  # too narrow for 1, 2, 5: even steps
        locator = ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
    _ticks(ax.yaxis, locator, "{:,g}".format)


def _rank_axes(ax: Axes, drawn: list[dict[int, float]], efficiency: bool) -> None:
    """Make the axis of ranks logarithmic, and that of times too; an efficiency begins at 0."""
    ranks = sorted(set().union(*drawn))
    values = [value for points in drawn for value in points.values()]
    ax.set(xscale="log", xlim=(ranks[0] / 1.15, ranks[-1] * 1.15))
    low, high = math.ceil(math.log2(ranks[0])), math.floor(math.log2(ranks[-1]))
    powers = [2**p for p in range(low, high + 1, 1 + max(0, high - low) // 13)]
    ticks = ranks if ranks[-1] <= 12 else powers or [ranks[0]]
    _ticks(ax.xaxis, ticker.FixedLocator(ticks), "{:,.0f}".format)
    if efficiency:
        ax.set_ylim(0, 1.06 * max(100, *values))
        ax.yaxis.set_major_locator(ticker.MultipleLocator(20))
        return
    ax.set_yscale("log")
    locator, _ = _log_limits(ax, values)
    _ticks(ax.yaxis, locator, lambda v: f"{v:,.0f}" if v >= 1 else f"{v:g}")


def _log_limits(ax: Axes, values: list[float]) -> tuple[ticker.Locator, float]:
    """Set the limits of a logarithmic y axis; return where its ticks are, and high over low."""
    low, high = min(values), max(values)
    margin = 0.06 * math.log(high / low) or 0.5
    ax.set_ylim(low * math.exp(-margin), high * math.exp(margin))
    locator = ticker.LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0))
    return locator, high / low


def _tick_at_one(ax: Axes) -> None:
    """Name 1 on a logarithmic y axis, and leave out the ticks that are too close to it."""
    low, high = ax.get_ylim()
    apart = 0.12 * math.log(high / low)
    others = [at for at in ax.get_yticks() if low <= at <= high and abs(math.log(at)) >= apart]
    ax.yaxis.set_major_locator(ticker.FixedLocator(sorted([1, *others])))


def _ticks(axis, locator, label) -> None:
    axis.set_major_locator(locator)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: label(value)))
