"""How long one step takes: bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.ticker import MaxNLocator

from ddp_kit.plot.numbers import significant, table
from ddp_kit.plot.picture import Picture, label_axes
from ddp_kit.plot.style import INK, QUIET, fold, write

BAR, WHISKER = "#9fb4c9", "#3f4f5f"
TOP, CHART, ROW = 0.42, 5.4, 0.42  # inches


def step_times(times: Mapping[str, Sequence[float]], title: str | None = None) -> Picture:
    """Draw the median time of a step for each name, from the fastest to the slowest sample.

    times maps a name to the seconds of each step that was measured; they are drawn in
    milliseconds, in the order of the mapping. ValueError if there is no name, a name has no
    sample, or a sample is negative or not a number.
    """
    samples = {name: _read(name, values) for name, values in times.items()}
    if not samples:
        raise ValueError("times is empty: there is no step to draw")
    if title is None:
        title = "Time of one step"
    medians = [median(values) for values in samples.values()]
    rows = [[name, significant(m)] for name, m in zip(samples, medians, strict=True)]
    twin = table(title, ["", "median (ms)"], rows)

    names = ["\n".join(fold(name, 2.2, 9.5)) for name in samples]
    left = 0.25 + 0.079 * max(len(line) for name in names for line in name.split("\n"))
    height = ROW * len(names)
    picture = Picture(left + CHART + 0.3, TOP + height + 0.75, twin)
    sheet = picture.sheet()
    write(sheet, 0.02, 0.12, title, 11.5, weight="bold")
    said = "Bar and number: the median. Thin line: the fastest to the slowest step."
    write(sheet, 0.02, TOP + height + 0.67, said, 8.5, color=QUIET)
    ax = picture.chart(left, TOP, CHART, height, grid="x")
    label_axes(ax, "time of one step (ms)")
    places = range(len(names))
    ax.barh(places, medians, height=0.56, color=BAR, linewidth=0)
    longest = max(max(values) for values in samples.values()) or 1
    for place, (middle, values) in enumerate(zip(medians, samples.values(), strict=True)):
        low, high = min(values), max(values)
        ax.plot([low, high], [place] * 2, color=WHISKER, linewidth=1.1, linestyle="-", marker="")
        for end in (low, high) if low < high else ():
            ax.plot([end] * 2, [place - 0.1, place + 0.1], color=WHISKER, linewidth=1.1)
        at = max(middle, high) + 0.012 * longest
        write(ax, at, place, f"{significant(middle)} ms", 9, color=INK)
    ax.set(xlim=(0, longest * 1.17), ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(places, names)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7))
    return picture


def _read(name: str, values: Sequence[float]) -> list[float]:
    """Return the samples in milliseconds."""
    seconds = [float(value) for value in values]
    if not seconds:
        raise ValueError(f"{name!r} has no sample")
    for value in seconds:
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name!r} has a step of {value} seconds")
    return [1000 * value for value in seconds]
