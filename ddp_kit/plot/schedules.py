"""Schedules one above the other, on one axis: what each rank does, and until when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import Picture, open_picture, table
from ddp_kit.plot.style import EDGE, WIDTH, bars, rank_color, text_color, write

LEFT, ROW, HEAD, AXIS = 0.9, 0.3, 0.3, 0.42  # inches
LETTER = 0.075  # inches of a letter of a label


def schedules(
    given: Mapping[str, Sequence[tuple[int, float, float, str]]],
    title: str,
    along: str,
    names: Sequence[str] = (),
) -> Picture:
    """Draw schedules above each other.

    given: by its title, the spans of a schedule, each (rank, start, end, label). along: what the
    axis is. names: of the rows, if they are no ranks.

    Raises PlotError if there is no span.
    """
    ranks = 1 + max((span[0] for spans in given.values() for span in spans), default=-1)
    names = names or [f"rank {rank}" for rank in range(ranks)]
    lines = [
        [name, names[rank], " ".join(labels)]
        for name, spans in given.items()
        for rank, labels in _by_rank(spans).items()
    ]
    if not lines:
        raise PlotError("no schedule has a span: there is nothing to draw")
    text_table = table(title, ["", "", "what"], lines, align="<")
    ends = [end for spans in given.values() for _, _, end, _ in spans]
    length, height = max(ends) or 1, ROW * ranks
    below = HEAD + len(given) * (HEAD + height + AXIS)
    picture, sheet = open_picture(title, text_table, WIDTH, below)
    width, top = WIDTH - LEFT - 0.15, HEAD
    for name, spans in given.items():
        write(sheet, LEFT, top + HEAD / 2, name, 9.5)
        top += HEAD
        ax = picture.chart(LEFT, top, width, height, "x", xlabel=along)
        ax.set(xlim=(0, length), ylim=(ranks, 0), yticks=[])
        whole = all(float(end).is_integer() for end in ends)
        ax.xaxis.set_major_locator(MaxNLocator(integer=whole))
        for rank in range(ranks):
            write(sheet, LEFT - 0.1, top + (rank + 0.5) * ROW, names[rank], 8.5, ha="right")
        for rank, start, end, label in spans:
            fill = rank_color(rank)
            bars(ax, [(start, end - start)], (rank + 0.1, 0.8), fill, EDGE, linewidth=0.5)
            if (end - start) / length * width > LETTER * len(label):
                look = {"ha": "center", "color": text_color(fill)}
                write(ax, (start + end) / 2, rank + 0.5, label, 7.5, **look)
        top += height + AXIS
    return picture


def _by_rank(spans: Sequence[tuple[int, float, float, str]]) -> dict[int, list[str]]:
    """Return the labels of each rank's spans."""
    found: dict[int, list[str]] = {rank: [] for rank in sorted({span[0] for span in spans})}
    for rank, _, _, label in spans:
        found[rank].append(label)
    return found
