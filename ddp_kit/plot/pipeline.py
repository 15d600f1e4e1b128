"""What each rank of a pipeline computed when: numbered boxes, one row per rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import Picture, open_picture, read_ranks, short, table
from ddp_kit.plot.style import (
    EDGE,
    PAPER,
    QUIET,
    WIDTH,
    bars,
    blend,
    chip,
    fold,
    swatch,
    text_color,
    write,
)

KINDS = {  # name, fill
    "F": ("forward", "#8fa9c4"),
    "B": ("backward", "#dcc48e"),
    "I": ("backward of the input", "#e3a9b4"),
    "W": ("backward of the weights", "#8fb8b0"),
}
LEFT, TOP, ROW, HIGH = 0.9, 0.42, 0.42, 0.3  # inches
ROOM = 0.085  # inches that a digit needs
LOWER, PALER = 0.45, 0.35  # the boxes of a rank's last stage, beside those of its first


class Cell(NamedTuple):
    """What a rank computed for one micro-batch, and of which stage."""

    kind: str
    micro_batch: int
    start: float
    end: float
    stage: int


def pipeline(
    result: Iterable[Iterable[Sequence[Any]]],
    title: str | None = None,
    unit: str = "s",
    until: float = 0,
) -> Picture:
    """Draw the forwards and backwards of micro-batches that each rank of a pipeline computed.

    result[rank] has a rank's cells in their order, each (kind, micro_batch, start, end) or (kind,
    micro_batch, start, end, stage). The kind is "F" for a forward, "B" for a backward, or "I" and
    "W" for its halves, the gradients of the stage's input and of its weights. Without a stage, the
    stage is the rank. unit: of start and end, which all ranks count from one moment. until: how far
    the axis reaches at least, so that two pictures can be compared.

    If a rank has several stages, the boxes of a later one are lower and paler.

    The text has the order of each rank's cells, and no times: "F0 F1 B0 B1", or with the stage in
    front, as in "0F0 4F0", if a rank has cells of several stages.

    Raises PlotError if no rank has a cell, a cell is none of the above, ends before it begins, or
    begins before the one before it has ended, or if `until` is no finite number.
    """
    ranks = [_read(cells, rank) for rank, cells in enumerate(read_ranks(result))]
    if not any(ranks):
        raise PlotError("no rank has a cell: there is nothing to draw")
    if not isinstance(until, (int, float)) or not math.isfinite(until):
        raise PlotError(f"until must be a finite number, such as 33, got {short(until)}")
    title = "What each rank of the pipeline computed" if title is None else title
    several = any(len({cell.stage for cell in cells}) > 1 for cells in ranks)
    rows = [
        [f"rank {rank}", " ".join(_name(cell, several) for cell in cells) or "nothing"]
        for rank, cells in enumerate(ranks)
    ]
    header = "stage, kind and micro-batch" if several else "kind and micro-batch"
    text_table = table(title, ["", header], rows, align="<")
    return _draw(title, text_table, ranks, unit, several, until)


def _read(cells: Any, rank: int) -> list[Cell]:
    """Return a rank's cells."""
    if not isinstance(cells, Iterable):
        raise PlotError(f"a rank's cells must be a list, got {short(cells)}")
    read: list[Cell] = []
    for given in cells:
        values = tuple(given) if isinstance(given, Iterable) else (given,)
        if len(values) not in (4, 5) or values[0] not in KINDS:
            raise PlotError(
                "a cell must be (kind, micro_batch, start, end) or (kind, micro_batch, start, end, "
                f'stage), with the kind "F", "B", "I" or "W", got {short(given)}'
            )
        cell = Cell(*values[:4], values[4] if len(values) == 5 else rank)
        times = cell.start, cell.end
        if not all(isinstance(time, (int, float)) and math.isfinite(time) for time in times):
            raise PlotError(f"start and end of a cell must be finite numbers, got {given!r}")
        earliest = read[-1].end if read else cell.start
        if not earliest <= cell.start <= cell.end:
            raise PlotError(
                f"the cells of rank {rank} must follow each other: {given!r} begins before "
                f"{earliest:g}, or ends before it begins"
            )
        read.append(cell)
    return read


def _name(cell: Cell, several: bool) -> str:
    return f"{cell.stage if several else ''}{cell.kind}{cell.micro_batch}"


def _draw(
    title: str,
    text_table: str,
    ranks: list[list[Cell]],
    unit: str,
    several: bool,
    until: float,
) -> Picture:
    cells = [cell for rank in ranks for cell in rank]
    begin, end = min(cell.start for cell in cells), max(cell.end for cell in cells)
    length = (end - begin) or 1.0
    busy = sum(cell.end - cell.start for cell in cells)
    idle = 1 - busy / (len(ranks) * length)
    text = (
        "The number in a box is its micro-batch. Blank"
        f"{' until the last box ends' if until > length else ''} is the bubble, here "
        f"{100 * idle:.1f} % of the time of all ranks."
    )
    if several:
        text += " The boxes of a rank's later stage are lower and paler."
    caption = fold(text, WIDTH)
    height = len(ranks) * ROW
    below = TOP + height + 0.82
    picture, sheet = open_picture(title, text_table, WIDTH, below, caption, lift=0.07)
    width = WIDTH - LEFT - 0.15
    ax = picture.chart(LEFT, TOP, width, height, "x", xlabel=f"time ({unit})")
    length = max(length, until)
    ax.set(xlim=(0, length), ylim=(len(ranks), 0))
    ax.set_yticks([])
    for rank, own in enumerate(ranks):
        middle = TOP + (rank + 0.5) * ROW
        stages = sorted({cell.stage for cell in own})
        chip(sheet, 0.02, middle - (0.17 if several else 0.11), 0.72, 0.22, rank, f"rank {rank}")
        if several:
            named = ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))
            write(sheet, 0.38, middle + 0.12, named, 7, ha="center", color=QUIET)
        bottom = rank + (1 + HIGH / ROW) / 2
        for cell in own:
            later = stages.index(cell.stage) / max(1, len(stages) - 1)  # from 0 to 1
            fill = blend(KINDS[cell.kind][1], PAPER, PALER * later)
            high = (1 - LOWER * later) * HIGH / ROW
            x, wide = cell.start - begin, cell.end - cell.start
            bars(ax, [(x, wide)], (bottom - high, high), fill, EDGE, linewidth=0.5)
            number = str(cell.micro_batch)
            if wide / length * width > ROOM * len(number):
                style = {"ha": "center", "color": text_color(fill)}
                write(ax, x + wide / 2, bottom - high / 2, number, 8, **style)
    x = LEFT
    for kind, (name, fill) in KINDS.items():
        if any(cell.kind == kind for cell in cells):
            x = swatch(sheet, x, TOP + height + 0.58, name, fill, EDGE, linewidth=0.5)
    return picture
