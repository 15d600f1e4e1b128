"""The names of lines, written at their ends."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from ddp_kit.plot.style import FAMILY, INK

LINE = 0.175  # inches, of one line of text
LEADER = 0.24  # inches, from the axes to the names


def name_lines(
    ax: Axes, names: Sequence[str], ends: Sequence[tuple[float, float]], colors: Sequence[str]
) -> None:
    """Write each name to the right of the axes, led by a thin line to its end.

    ends: the last point of each line, in data; the limits of the axes must be set before.
    Names whose ends lie close are moved apart, so coinciding lines have names one can read.
    """
    ax.get_ylim()  # autoscaling is lazy, and reading transData does not set it off
    size = ax.get_figure().get_size_inches() * ax.get_position().size
    to_axes = ax.transData + ax.transAxes.inverted()
    wanted = [to_axes.transform(end)[1] * size[1] for end in ends]
    gap = LINE * max(name.count("\n") + 1 for name in names)
    for name, end, color, at in zip(names, ends, colors, spread(wanted, gap, size[1]), strict=True):
        ax.annotate(
            name,
            xy=end,
            xytext=(1 + LEADER / size[0], at / size[1]),
            textcoords="axes fraction",
            fontsize=9,
            family=FAMILY,
            color=INK,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 1.1,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def spread(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Move heights apart to at least `gap`, within 0 and `top`, keeping their order."""
    order = sorted(range(len(heights)), key=lambda i: (heights[i], -i))
    placed = list(heights)
    floor = 0.0
    for i in order:
        placed[i] = max(placed[i], floor)
        floor = placed[i] + gap
    ceiling = top
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed
