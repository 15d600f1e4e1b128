"""How long a training step takes, for each setting or implementation: bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from statistics import median

from matplotlib import ticker

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import LARGEST, Picture, open_picture, read_named, read_numbers, table
from ddp_kit.plot.style import EDGE, QUIET, fold, significant, write

TOP = 0.42  # inches


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


def _samples(name: str, values: Sequence[float]) -> list[float]:
    """Return the samples in milliseconds."""
    seconds = read_numbers(values)
    if not seconds:
        raise PlotError(f"{name!r} has no samples")
    for value in seconds:
        if not (isinstance(value, Real) and 0 <= value < LARGEST):
            raise PlotError(f"{name!r} has a step of {value!r} seconds: must be finite and >= 0")
    return [1000 * value for value in seconds]
