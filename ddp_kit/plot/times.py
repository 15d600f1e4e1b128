"""How long communication and training steps take: bandwidth, scaling and step_times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles

from matplotlib import ticker
from matplotlib.axes import Axes

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import LEADER, Picture, name_lines, open_picture, read_named, table
from ddp_kit.plot.style import (
    EDGE,
    INK,
    NOTHING,
    PAPER,
    QUIET,
    TIMES,
    byte_size,
    fold,
    marker,
    series_color,
    significant,
    write,
)

LEFT, TOP = 0.78, 0.42  # inches, of every chart here but that of step_times
Pairs = Iterable[tuple[int, float]]
Series = dict[str, dict[int, float]]


def bandwidth(
    series: Mapping[str, Iterable[tuple[int, float | Sequence[float]]]],
    title: str | None = None,
    model: Mapping[str, Pairs] | None = None,
) -> Picture:
    """Draw time against message size for each series, and each as a ratio to the first.

    series maps a name to pairs (nbytes, seconds), one pair per size. In place of seconds there may
    be a list of samples: their median is drawn, with a thin bar from the first to the third
    quartile. Both axes are logarithmic; time is drawn in milliseconds. With two or more series, a
    second panel shows how many times as long as the first series each of the others takes, at the
    sizes both have.
    model: maps names of series to pairs (nbytes, seconds), which are drawn as dashed lines.

    Raises PlotError if there is no series, a series is empty or has a size twice, a number is not
    positive, or the model has a name that is no series.
    """
    read_named("series", series, "each name to pairs (nbytes, seconds)")
    given = {name: [(n, _as_list(each)) for n, each in pairs] for name, pairs in series.items()}
    for name, pairs in given.items():
        for n, each in pairs:
            if not each:
                raise PlotError(f"{name!r} has no samples for {n} bytes")
    points, low, high = (
        {
            name: _points(name, [(n, pick(each)) for n, each in pairs], "bytes", 1000)
            for name, pairs in given.items()
        }
        for pick in (median, _first_quartile, _third_quartile)
    )
    modelled = {}
    for name, pairs in (model or {}).items():
        if name not in points:
            raise PlotError(f"model has {name!r}, but the series are {', '.join(points)}")
        modelled[name] = _points(f"{name}, model", pairs, "bytes", 1000)
    title = "Time of one call by message size" if title is None else title
    wide, tall, gap, small = 5.9, 2.5, 0.22, 1.15  # inches
    names, right = _names(points)
    compare = len(points) > 1
    height = TOP + tall + (gap + small if compare else 0) + 0.55
    sizes = sorted(set().union(*points.values()))
    columns = points | {
        f"{name}, model": {n: time for n, time in line.items() if n in sizes}
        for name, line in modelled.items()
    }
    text_table = _table(f"{title} (ms)", "bytes", columns)
    many = any(len(each) > 1 for pairs in given.values() for _, each in pairs)
    notes = ["Thin bar: from the first to the third quartile."] * many
    caption = " ".join(notes + ["Dashed: the model."] * bool(modelled))
    size = LEFT + wide + right, height
    picture, _ = open_picture(title, text_table, *size, fold(caption, size[0]))
    xlabel = "message size (bytes)"
    ax = picture.chart(LEFT, TOP, wide, tall, "both", "" if compare else xlabel, "time (ms)")
    lines = [*low.values(), *high.values(), *modelled.values()]
    _log_log(ax, sizes, [time for times in lines for time in times.values()])
    for i, (name, times) in enumerate(points.items()):
        _line(ax, i, times)
        style = {"color": series_color(i), "marker": "", "zorder": 2.5}
        for n in times if many else ():
            ax.plot([n, n], [low[name][n], high[name][n]], linewidth=1.1, linestyle="-", **style)
        if name in modelled:
            line = modelled[name]
            ax.plot(list(line), list(line.values()), linewidth=1.4, linestyle=(0, (4, 2)), **style)
    name_lines(ax, names, _ends(points), [series_color(i) for i in range(len(points))])
    if compare:
        ax.tick_params(axis="x", labelbottom=False)
        top, ratio = TOP + tall + gap, "\n".join(fold(f"{TIMES} {next(iter(points))}", 1.15))
        below = picture.chart(LEFT, top, wide, small, "both", xlabel, ratio)
        first, *others = points.values()
        ratios = [{n: t / first[n] for n, t in times.items() if n in first} for times in others]
        shown = [ratio for line in ratios for ratio in line.values()]
        _log_log(below, sizes, [1 / 1.3, 1.3, *shown])
        below.axhline(1, color=series_color(0), linewidth=1.2, linestyle="-", zorder=2)
        for i, line in enumerate(ratios, start=1):
            if line:
                _line(below, i, line)
    return picture


def scaling(
    predicted: Mapping[str, Pairs],
    measured: Mapping[str, Pairs] | None = None,
    published: Mapping[str, Pairs] | None = None,
    efficiency: bool = False,
    title: str | None = None,
) -> Picture:
    """Draw seconds or efficiency against the number of ranks: predicted, measured, published.

    Each argument maps a name to pairs of ranks and seconds or, with `efficiency`, to pairs of
    ranks and a share of 1. predicted: lines. measured: filled marks, in the colour of the line of
    the same name. published: hollow marks, named below. Both axes are logarithmic, except that of
    an efficiency; seconds are drawn in milliseconds.

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
    colors = {name: series_color(i) for i, name in enumerate({**lines, **dots})}
    for name, points in lines.items():
        ax.plot(list(points), list(points.values()), color=colors[name], linewidth=1.6, zorder=2)
    for name, points in dots.items():
        _marks(ax, points, list(colors).index(name), colors[name], colors[name])
    for i, points in enumerate(others.values()):
        _marks(ax, points, i, PAPER, INK)
    _rank_axes(ax, list(columns.values()), efficiency)
    name_lines(ax, names, _ends(lines), [colors[name] for name in lines])

    y = TOP + tall + 0.66
    sheet.plot([LEFT, LEFT + 0.3], [y, y], color=INK, linewidth=1.6)
    write(sheet, LEFT + 0.38, y, "line: predicted", 8.5)
    if dots:
        _marks(sheet, {LEFT + 1.9: y}, 0, INK, INK)
        write(sheet, LEFT + 2.05, y, "filled: measured here", 8.5)
    for i, name in enumerate(others):
        at = y + row * (1 + i)
        _marks(sheet, {LEFT + 0.15: at}, i, PAPER, INK)
        write(sheet, LEFT + 0.38, at, f"hollow: published, {name}", 8.5)
    return picture


def step_times(times: Mapping[str, Sequence[float]], title: str | None = None) -> Picture:
    """Draw the median time of a step for each name, from the fastest to the slowest sample.

    times maps a name to the seconds of each step that was measured; they are drawn in
    milliseconds, in the order of the mapping. Raises PlotError if there is no name, a name has no
    samples, or a sample is negative or not finite.
    """
    read_named("times", times, "each name to a list of seconds")
    samples = {name: _samples(name, values) for name, values in times.items()}
    medians = [median(values) for values in samples.values()]
    title = "Time of one step" if title is None else title
    rows = [[name, significant(m)] for name, m in zip(samples, medians, strict=True)]
    text_table = table(title, ["", "median (ms)"], rows)

    names = ["\n".join(fold(name, 2.2, 9.5)) for name in samples]
    left = 0.25 + 0.079 * max(len(line) for name in names for line in name.split("\n"))
    wide, height = 5.4, 0.42 * len(names)  # inches
    caption = ["Bar: the median. Thin line: from the fastest to the slowest step."]
    values = [f"{significant(middle)} ms" for middle in medians]
    right = 0.2 + 0.079 * max(map(len, values))
    top = TOP + 0.16  # below the heading of the medians
    full, below = left + wide + right + 0.1, top + height + 0.75 - 0.17
    picture, sheet = open_picture(title, text_table, full, below, caption, lift=0.09)
    at = left + wide + right
    write(sheet, at, top - 0.1, "median", 8.5, color=QUIET, ha="right")
    for row, value in enumerate(values):
        write(sheet, at, top + (row + 0.5) * height / len(values), value, ha="right")
    ax = picture.chart(left, top, wide, height, "x", "time of one step (ms)")
    rows_at = range(len(names))
    ax.barh(rows_at, medians, height=0.56, color="#9fb4c9", linewidth=0)
    longest = max(max(each) for each in samples.values()) or 1
    for row, each in enumerate(samples.values()):
        low, high = min(each), max(each)
        ax.plot([low, high], [row] * 2, color=EDGE, linewidth=1.1, linestyle="-", marker="")
        for end in (low, high) if low < high else ():
            ax.plot([end] * 2, [row - 0.1, row + 0.1], color=EDGE, linewidth=1.1)
    ax.set(xlim=(0, longest * 1.03), ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(rows_at, names)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(nbins=7))
    return picture


def _as_list(seconds: float | Sequence[float]) -> list[float]:
    return list(seconds) if isinstance(seconds, Iterable) else [seconds]


def _first_quartile(values: list[float]) -> float:
    return quantiles(values, method="inclusive")[0] if len(values) > 1 else values[0]


def _third_quartile(values: list[float]) -> float:
    return quantiles(values, method="inclusive")[2] if len(values) > 1 else values[0]


def _points(name: str, pairs: Pairs, unit: str, factor: float) -> dict[int, float]:
    """Return the points of one series in order, with `factor` times each value.

    unit: what the first number of a pair counts, "bytes" or "ranks".
    """
    points: dict[int, float] = {}
    for at, value in pairs:
        if not at > 0 or not 0 < value < math.inf:
            raise PlotError(
                f"{name!r} has {value} for {at} {unit}: both must be positive and finite"
            )
        if at in points:
            raise PlotError(f"{name!r} has {at} {unit} twice: give one value for each number")
        points[at] = factor * value
    if not points:
        raise PlotError(f"{name!r} has no points")
    return dict(sorted(points.items()))


def _samples(name: str, values: Sequence[float]) -> list[float]:
    """Return the samples in milliseconds."""
    seconds = [float(value) for value in values]
    if not seconds:
        raise PlotError(f"{name!r} has no samples")
    for value in seconds:
        if not math.isfinite(value) or value < 0:
            raise PlotError(f"{name!r} has a step of {value} seconds: must be finite and >= 0")
    return [1000 * value for value in seconds]


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


def _line(ax: Axes, index: int, values: dict[int, float]) -> None:
    style = {"color": series_color(index), "linewidth": 1.6, "linestyle": "-", "zorder": 3}
    style |= {"marker": marker(index), "markersize": 6}
    style |= {"markeredgecolor": PAPER, "markeredgewidth": 0.6}
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
    _ticks(ax.xaxis, ticker.FixedLocator(ticks), byte_size)
    locator, ratio = _log_limits(ax, values)
    if ratio <= 8:  # too narrow for 1, 2, 5: even steps
        locator = ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
    _ticks(ax.yaxis, locator, "{:,g}".format)


def _rank_axes(ax: Axes, drawn: list[dict[int, float]], efficiency: bool) -> None:
    """Make the axis of ranks logarithmic, and that of times too; an efficiency begins at 0."""
    ranks = sorted(set().union(*drawn))
    values = [value for points in drawn for value in points.values()]
    ax.set(xscale="log", xlim=(ranks[0] / 1.15, ranks[-1] * 1.15))
    powers = range(math.floor(math.log2(ranks[0])), 1 + math.ceil(math.log2(ranks[-1])))
    step = 1 + len(powers) // 13
    ticks = [2**p for p in powers[::step] if ranks[0] <= 2**p <= ranks[-1]] or [ranks[0]]
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


def _ticks(axis, locator, label) -> None:
    axis.set_major_locator(locator)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: label(value)))
