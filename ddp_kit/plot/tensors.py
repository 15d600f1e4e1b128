"""What every rank holds, before and after: boxes of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ddp_kit.plot.cells import (
    ELLIPSIS,
    EMPTY,
    NOTHING,
    Column,
    cell_text,
    elide,
    entry_text,
    gaps,
    origins,
    read,
)
from ddp_kit.plot.numbers import table
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.style import (
    INK,
    PAPER,
    QUIET,
    WIDTH,
    box,
    chip,
    fold,
    rank_color,
    text_color,
    write,
)

NEW, SHARED = "#d0d0d0", PAPER
MOST_COLUMNS, ALL_COLUMNS = 8, 16
LEFT, ARROW, BLOCK_GAP, ROW_GAP, HEIGHT = 0.75, 0.55, 0.09, 0.14, 0.3  # inches
TYPE = (9.5, 8.75, 8)  # points; smaller ones are hard to read


def tensors(
    result: Sequence[dict[str, Any]], title: str | None = None, name: str = "rank"
) -> Picture:
    """Draw what every rank holds at each stage, before → after.

    result[rank] is a dict, stage name → value, with the same names on every rank. A value is
    a tensor of at most two dimensions, a list of tensors (drawn as separate blocks), or None
    where the rank holds nothing.

    Colour tells where a number comes from, by comparing values: one that a single rank held
    at the first stage has that rank's colour in every stage; one that nobody held is grey and
    bold; one that several ranks held is white. So give each rank numbers of its own, and
    sums that are nobody's number (powers of ten do). A stage of up to 16 columns is
    drawn whole if it fits, else at most eight columns and four rows: then the middle is left
    out, and the caption says so.

    ValueError if the result is empty, a rank's value is not a dict of such values, or the
    ranks have different stages.

    name: what a holder is called, where it is no rank: "device".
    """
    ranks = read(result)
    stages = list(ranks[0])
    origin = origins([rank[stages[0]] for rank in ranks])
    if title is None:
        title = f"What each {name} holds: " + " → ".join(stages)

    chip_width = 0.58 if len(name) <= 4 else 0.18 + 0.075 * len(f"{name} 0")
    edge = LEFT + chip_width - 0.58
    cells, size, width, wide = _fit(ranks, stages, WIDTH - edge)
    total = edge + sum(wide) + ARROW * (len(stages) - 1)
    caption = fold(_caption(stages[0], cells, origin, name), max(total, 6))
    tall = [HEIGHT * max(_height(cell) for cell in row) for row in cells]
    top = 0.64
    below = top + sum(tall) + ROW_GAP * len(tall)
    twin = table(
        title,
        ["", *stages],
        [[f"{name} {r}", *(cell_text(cell) for cell in row)] for r, row in enumerate(cells)],
        align="<",
    )
    picture = Picture(max(total, 6) + 0.02, below + 0.04 + 0.17 * len(caption), twin)
    ax = picture.sheet()
    write(ax, 0, 0.12, title, 11.5, weight="bold")
    left = [edge + sum(wide[:s]) + ARROW * s for s in range(len(stages))]
    for s, stage in enumerate(stages):
        write(ax, left[s], top - 0.16, stage, 9.5, color=QUIET)
        if s:
            _arrow(ax, left[s] - ARROW, top + (below - ROW_GAP - top) / 2)
    y = top
    for r, row in enumerate(cells):
        chip(ax, 0, y + tall[r] / 2 - 0.11, chip_width, 0.22, r, f"{name} {r}")
        for s, cell in enumerate(row):
            top_of_cell = y + (tall[r] - HEIGHT * _height(cell)) / 2
            _draw(ax, left[s], top_of_cell, cell, width, size, origin)
        y += tall[r] + ROW_GAP
    for i, line in enumerate(caption):
        write(ax, 0, below + 0.1 + 0.17 * i, line, 8.5, color=QUIET)
    return picture


def _fit(ranks: list[dict[str, list[Column]]], stages: list[str], room: float):
    """Find the type and the number of columns that fit into `room` inches.

    Up to 16 columns are drawn where that leaves out none; else at most eight. Returns the
    columns to draw by rank and stage, the type in points, the widths of a box and of each
    stage in inches.
    """
    longest = max(len(columns) for rank in ranks for columns in rank.values())
    limits = [ALL_COLUMNS] * (longest <= ALL_COLUMNS) + list(range(MOST_COLUMNS, 2, -1))
    for limit, size in itertools.product(limits, TYPE):
        cells = [[elide(rank[stage], limit) for stage in stages] for rank in ranks]
        box_width = _box_width(cells, size)
        wide = [
            max(0.08 * len(stage), *(_width(row[s], box_width) for row in cells))
            for s, stage in enumerate(stages)
        ]
        if sum(wide) + ARROW * (len(stages) - 1) <= room:
            break
    return cells, size, box_width, wide


def _box_width(cells: list[list[list[Column]]], size: float) -> float:
    longest = max(
        len(entry_text(entry))
        for row in cells
        for cell in row
        for column in cell
        for entry in column.entries
    )
    return max(0.34, 0.64 * longest * size / 72 + 0.12)


def _width(cell: list[Column], box_width: float) -> float:
    return len(cell) * box_width + gaps(cell)[-1] * BLOCK_GAP


def _height(cell: list[Column]) -> int:
    return max(len(column.entries) for column in cell)


def _draw(ax, x, y, cell, width, size, origin) -> None:
    tall = _height(cell)
    for i, (column, gap) in enumerate(zip(cell, gaps(cell), strict=True)):
        left = x + i * width + gap * BLOCK_GAP
        top = y + (tall - len(column.entries)) * HEIGHT / 2
        for j, entry in enumerate(column.entries):
            middle = (left + width / 2, top + (j + 0.5) * HEIGHT)
            style = {"ha": "center", "color": QUIET}
            if entry in (NOTHING, EMPTY):
                edge = {"linestyle": (0, (3, 2)), "zorder": 0.9}
                box(ax, left, top + j * HEIGHT, width, HEIGHT, PAPER, "#a6a6a6", **edge)
            elif entry != ELLIPSIS:
                fill = _fill(entry, origin)
                box(ax, left, top + j * HEIGHT, width, HEIGHT, fill, "#8c8c8c")
                style["color"] = text_color(fill)
                style["weight"] = "bold" if fill == NEW else "normal"
            write(ax, *middle, entry_text(entry), size, **style)


def _fill(entry: Any, origin: dict[Any, set[int]]) -> str:
    holders = origin.get(entry, set())
    if len(holders) == 1:
        return rank_color(next(iter(holders)))
    return SHARED if holders else NEW


def _arrow(ax, x: float, y: float) -> None:
    ax.annotate(
        "",
        xy=(x + ARROW - 0.13, y),
        xytext=(x + 0.13, y),
        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "mutation_scale": 11},
    )


def _caption(first: str, cells, origin, name: str) -> str:
    """Say what the colours and signs mean that occur in this picture."""
    drawn = {e for row in cells for cell in row for column in cell for e in column.entries}
    fills = {_fill(e, origin) for e in drawn if not isinstance(e, str)}
    said = []
    if fills - {NEW, SHARED}:
        said.append(f"Colour: the one {name} that held this number at “{first}”.")
    if NEW in fills:
        said.append(f"Grey and bold: a new number, held by no {name} at “{first}”.")
    if SHARED in fills:
        said.append(f"White: held by several {name}s at “{first}”.")
    if drawn & {NOTHING, EMPTY}:
        said.append("Dashed: nothing here.")
    if ELLIPSIS in drawn:
        said.append("The middle of longer rows is left out (…).")
    return " ".join(said)
