"""What was measured: losses, and how long communication and training steps take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from numbers import Real
from statistics import median, quantiles
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes

from ddp_kit.errors import PlotError
from ddp_kit.plot import picture as pictures
from ddp_kit.plot import style
from ddp_kit.plot.picture import LARGEST, Picture, open_picture, plain, read_named, read_numbers
from ddp_kit.plot.style import INK, PAPER, TIMES, marker, series_color, significant, write

LEFT, TOP, WIDE, TALL = 0.75, 0.42, 5.7, 2.7  # inches
MOST_MARKERS = 12  # points of a line; above, only its end is marked
CLOSE = 0.02  # of the height of all lines: closer than this, one line hides the other
DASH = 3.5  # points of each rank's colour in one period where all lines coincide
Pairs = Iterable[tuple[int, float]]
Series = dict[str, dict[int, float]]


def _fold(name: str) -> str:
    return "\n".join(style.fold(name, 2, 9))


def _width(names: Iterable[str]) -> float:
    """Return the inches of a picture with a legend of these names."""
    longest = max(len(line) for name in names for line in _fold(name).split("\n"))
    return LEFT + WIDE + 0.55 + 0.076 * longest


def _draw_legend(ax: Axes) -> None:
    look = {"prop": {"family": style.FAMILY, "size": 9}, "labelcolor": INK, "frameon": False}
    place = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "numpoints": 1}
    ax.legend(**place, **look, labelspacing=0.6, scatterpoints=1)


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
        lines = {str(name): _losses(f"{name!r} must be", value) for name, value in given.items()}
        fills = edges = [series_color(i) for i in range(len(lines))]
    else:
        of, ranks = " of each rank", range(len(values := pictures.read_ranks(result)))
        lines = {f"rank {r}": _losses(f"rank {r} must return", values[r]) for r in ranks}
        fills, edges = [style.rank_color(r) for r in ranks], [style.edge_color(r) for r in ranks]
    if title is None:
        title = f"{ylabel[:1].upper()}{ylabel[1:]}{of}, {xlabel} by {xlabel}"
    rows = [[name, f"{y[0]:.2f}", f"{y[-1]:.2f}"] for name, y in lines.items()]
    text_table = pictures.table(title, ["", f"first {xlabel}", f"last {xlabel}"], rows)

    height = max(TALL, 0.19 * len(lines))
    caption = " ".join(filter(None, (_note_end(name, y, xlabel) for name, y in lines.items())))
    picture, _ = open_picture(title, text_table, _width(lines), TOP + height + 0.52, caption)
    ax = picture.chart(LEFT, TOP, WIDE, height, "y", xlabel, ylabel)
    dashed = _some_meet(list(lines.values()))
    for i, (name, y) in enumerate(lines.items()):
        _loss_line(ax, i, name, y, len(lines), fills[i], edges[i], dashed)
    longest = max(map(len, lines.values()))
    margin = 0.03 * (longest - 1) or 0.5
    ax.set_xlim(1 - margin, longest + margin)
    ax.margins(y=0.07)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_locator(ticker.MaxNLocator(nbins=6))
    ax.ticklabel_format(axis="y", useOffset=False)
    _draw_legend(ax)
    return picture


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
    quarters = {
        name: {n: _quartiles(samples) for n, samples in _read(name, pairs, "bytes").items()}
        for name, pairs in series.items()
        if name in chosen
    }
    points = {name: {n: q[1] for n, q in found.items()} for name, found in quarters.items()}
    many = any(low < high for found in quarters.values() for low, _, high in found.values())
    modelled = {}
    if model:
        read_named("model", model, "names of series to pairs (nbytes, seconds)")
        for name, pairs in model.items():
            if name not in points:
                raise PlotError(f"model has {name!r}, but the series are {', '.join(points)}")
            modelled[name] = _points(f"{name}, model", pairs, "bytes", 1000)
    title = "Time of one call by tensor size" if title is None else title
    if residuals and any(set(points[name]) - set(modelled.get(name, ())) for name in points):
        raise PlotError("residuals need a model of each series that is drawn, at each size")
    compare = len(points) > 1 or residuals
    tall, gap, small = 2.5, 0.22, 1.15  # inches
    below = TOP + tall + (gap + small) * compare + 0.55
    sizes = sorted(set().union(*points.values()))
    columns = points | {
        f"{name}, model": {n: time for n, time in line.items() if n in sizes}
        for name, line in modelled.items()
    }
    text_table = _table(f"{title} (ms)", "bytes", columns)
    notes = ["Thin bar: from the first to the third quartile."] * many
    caption = " ".join(notes + [f"{'Dotted' if dashed else 'Dashed'}: the model."] * bool(modelled))
    picture, _ = open_picture(title, text_table, _width(points), below, caption)
    xlabel = "size of the tensor"  # each tick has its unit
    ax = picture.chart(LEFT, TOP, WIDE, tall, "both", "" if compare else xlabel, "time (ms)")
    for name, line in points.items():
        _line(ax, looks[name], line, name in dashed, name)
        look = {"color": series_color(looks[name]), "marker": "", "zorder": 2.5}
        for n, (low, _, high) in quarters[name].items() if many else ():
            ax.plot([n, n], [low, high], linewidth=1.1, linestyle="-", **look)
        if name in modelled:
            look |= {"linewidth": 1.4, "linestyle": (0, (1, 1.3) if dashed else (4, 2))}
            ax.plot(list(modelled[name]), list(modelled[name].values()), **look)
    _draw_legend(ax)
    _log_log(ax, sizes)
    if compare:
        ax.tick_params(axis="x", labelbottom=False)
        base, *others = points
        bases = modelled if residuals else dict.fromkeys(others, points[base])
        ratio = "\n".join(style.fold(f"{TIMES} {'the model' if residuals else base}", 1.15))
        lower = picture.chart(LEFT, TOP + tall + gap, WIDE, small, "both", xlabel, ratio)
        ratios = {
            o: {n: t / b[n] for n, t in points[o].items() if n in b} for o, b in bases.items()
        }
        color = INK if residuals else series_color(looks[base])
        lower.axhline(1, color=color, linewidth=1.2, linestyle="-", zorder=2)
        for name, line in ratios.items():
            _line(lower, looks[name], line, name in dashed)
        lower.update_datalim([(sizes[0], 1 / 1.3), (sizes[0], 1.3)])
        _log_log(lower, sizes)
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
    text_table = _table(f"{title} ({unit})", "ranks", columns)
    hollow = {name: f"published, hollow: {name}" for name in others}
    names = [*lines, *hollow.values(), *["measured here: filled"] * bool(dots)]
    picture, _ = open_picture(title, text_table, _width(names), TOP + TALL + 0.52)
    ylabel = "efficiency (%)" if efficiency else "time (ms)"
    ax = picture.chart(LEFT, TOP, WIDE, TALL, "both", "ranks", ylabel)
    colors = {n: series_color(i) for i, n in enumerate(dict.fromkeys([*order, *lines, *dots]))}
    for name, points in lines.items():
        look = {"color": colors[name], "linewidth": 1.6, "zorder": 2, "label": _fold(name)}
        ax.plot(list(points), list(points.values()), **look)
    if dots:
        _marks(ax, {}, 0, INK, INK, "measured here: filled")
    for name, points in dots.items():
        _marks(ax, points, list(colors).index(name), colors[name], colors[name])
    for i, (name, points) in enumerate(others.items()):
        rim = next((colors[n] for n in lines if name.startswith(n)), INK)
        _marks(ax, points, i, PAPER, rim, _fold(hollow[name]))
    _draw_legend(ax)
    ranks = sorted(set().union(*columns.values()))
    ax.set(xscale="log", xlim=(ranks[0] / 1.15, ranks[-1] * 1.15))
    few = ranks[-1] <= 12
    locator = ticker.FixedLocator(ranks) if few else ticker.LogLocator(2, numticks=14)
    _ticks(ax.xaxis, locator, "{:,.0f}".format)
    if efficiency:
        highest = max(value for points in columns.values() for value in points.values())
        ax.set_ylim(0, 1.06 * max(100, highest))
        ax.yaxis.set_major_locator(ticker.MultipleLocator(20))
    else:
        _log_times(ax)
    return picture


def step_times(times: Mapping[str, Sequence[float]], title: str | None = None) -> Picture:
    """Draw the median time of a step for each name, and its first and third quartile.

    times maps a name to the seconds of each step that was measured; they are drawn in
    milliseconds, in the order of the mapping. Raises PlotError if there is no name, a name has no
    samples, or a sample is not positive and finite.
    """
    read_named("times", times, "each name to a list of seconds")
    quarters = {
        name: _quartiles(_positive(f"{name!r} has", read_numbers(values)))
        for name, values in times.items()
    }
    medians = [middle for _, middle, _ in quarters.values()]
    title = "Time of one step" if title is None else title
    rows = [[name, significant(m)] for name, m in zip(quarters, medians, strict=True)]
    text_table = pictures.table(title, ["", "median (ms)"], rows)

    names = ["\n".join(style.fold(name, 2.2, 9.5)) for name in quarters]
    left = 0.25 + 0.079 * max(len(line) for name in names for line in name.split("\n"))
    wide, row, top = 5.4, 0.42, TOP + 0.16  # inches; the top is below the heading of the medians
    height, right = row * len(names), left + wide + 0.9
    caption = "Bar: the median. Thin line: from the first to the third quartile."
    picture, sheet = open_picture(title, text_table, right, top + height + 0.58, caption)
    write(sheet, right, top - 0.1, "median", 8.5, color=style.QUIET, ha="right")
    for i, middle in enumerate(medians):
        write(sheet, right, top + (i + 0.5) * row, f"{significant(middle)} ms", ha="right")
    ax = picture.chart(left, top, wide, height, "x", "time of one step (ms)")
    reach = [(middle - low, high - middle) for low, middle, high in quarters.values()]
    whisker = {"ecolor": style.EDGE, "elinewidth": 1.1, "capsize": 2.5}
    look = {"color": "#9fb4c9", "linewidth": 0, "error_kw": whisker}
    ax.barh(range(len(names)), medians, height=0.56, xerr=list(zip(*reach, strict=True)), **look)
    longest = max(high for _, _, high in quarters.values()) or 1
    ax.set(xlim=(0, longest * 1.03), ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(nbins=7))
    return picture


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and 0 < value < LARGEST


def _quartiles(values: list[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile, in milliseconds."""
    three = quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return [1000 * seconds for seconds in three]


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
        if at in found:
            raise PlotError(f"{name!r} has {at} {unit} twice: give one value for each number")
        found[at] = _positive(f"{name!r} has for {at!r} {unit}", values)
    if not found or not all(map(_is_positive, found)):
        raise PlotError(f"{name!r} must have pairs with a positive number of {unit}, got {pairs!r}")
    return dict(sorted(found.items()))


def _positive(what: str, values: list[Any]) -> list[float]:
    for value in values or [None]:
        if not _is_positive(value):
            raise PlotError(f"{what} {value!r}: must be a positive and finite number")
    return values


def _points(name: str, pairs: Pairs, unit: str, factor: float) -> dict[int, float]:
    """Return the points of one series in order, with `factor` times each value."""
    return {at: factor * median(values) for at, values in _read(name, pairs, unit).items()}


def _table(title: str, first: str, columns: Series) -> str:
    rows = [
        [f"{n:,.0f}", *(significant(p[n]) if n in p else style.NOTHING for p in columns.values())]
        for n in sorted(set().union(*columns.values()))
    ]
    return pictures.table(title, [first, *columns], rows)


def _line(ax: Axes, index: int, values: dict[int, float], dashed: bool, name: str = "") -> None:
    color = series_color(index)
    look = {"color": color, "linewidth": 1.6, "linestyle": style.DASHES if dashed else "-"}
    look |= {"marker": marker(index), "markersize": 6, "label": _fold(name), "zorder": 3}
    look |= {"markeredgecolor": PAPER, "markeredgewidth": 0.6}
    if dashed:
        look |= {"markerfacecolor": PAPER, "markeredgecolor": color, "markeredgewidth": 1.2}
    ax.plot(list(values), list(values.values()), **look)


def _marks(
    ax: Axes, points: dict[int, float], index: int, face: str, edge: str, label: str = ""
) -> None:
    look = {"marker": marker(index), "markersize": 7, "linestyle": "", "zorder": 4, "label": label}
    rim = {"markerfacecolor": face, "markeredgecolor": PAPER if face == edge else edge}
    ax.plot(list(points), list(points.values()), **look, **rim, markeredgewidth=1.2)


def _log_log(ax: Axes, sizes: list[int]) -> None:
    """Make both axes logarithmic, with as many of the sizes named as there is room for."""
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    margin = 0.04 * (high - low) or 0.5
    ticks = sorted({sizes[0], sizes[-1]})  # these always
    for n in sizes:
        if all(abs(math.log(n / at)) >= 0.1 * (high - low) for at in ticks):
            ticks = sorted([*ticks, n])
    ax.set(xscale="log", xlim=(math.exp(low - margin), math.exp(high + margin)))
    _ticks(ax.xaxis, ticker.FixedLocator(ticks), lambda n: style.byte_size(n, digits=3))
    _log_times(ax)


def _log_times(ax: Axes) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5, or even ones if it is short."""
    ax.set_yscale("log")
    ax.margins(y=0.06)
    low, high = ax.get_ylim()
    locator = ticker.LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0))
    if high / low <= 3:
        locator = ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
    _ticks(ax.yaxis, locator, "{:,g}".format)


def _ticks(axis, locator, label) -> None:
    axis.set_major_locator(locator)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: label(value)))


def _losses(who: str, value: Sequence[float]) -> list[float]:
    try:
        numbers = [float(plain(number)) for number in plain(value)]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if not numbers:
        raise PlotError(f"{who} a sequence of losses, got {value!r}")
    return numbers


def _some_meet(lines: Sequence[list[float]]) -> bool:
    finite = [loss for y in lines for loss in y if math.isfinite(loss)]
    near = CLOSE * (max(finite) - min(finite)) if finite else 0.0
    return any(
        abs(a - b) <= near for ys in combinations(lines, 2) for a, b in zip(*ys, strict=False)
    )


def _loss_line(
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
    look = {"color": color, "linewidth": 2.2, "linestyle": dashes, "dash_capstyle": "butt"}
    # Smaller for later lines, so that earlier ones show behind them.
    marks = {"marker": marker(i), "markersize": widest - (widest - 5.5) * i / max(1, total - 1)}
    marks |= {"markeredgecolor": PAPER if edge == color else edge, "markeredgewidth": 0.6}
    marks |= {"markevery": 1 if len(y) <= MOST_MARKERS else [len(y) - 1]}
    ax.plot(x, y, label=_fold(name), zorder=3 + i / 100, **look, **marks)


def _note_end(name: str, y: list[float], xlabel: str) -> str:
    """Return from where on the losses of a line cannot be drawn; "" if all can."""
    bad = next((x for x, loss in enumerate(y, start=1) if not math.isfinite(loss)), None)
    return "" if bad is None else f"{name[:1].upper()}{name[1:]}: {y[bad - 1]:g} in {xlabel} {bad}."
