"""What every rank holds, before and after: boxes of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Number
from operator import attrgetter
from typing import Any

from matplotlib.axes import Axes

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import Picture, open_picture, read_ranks, room_for, table
from ddp_kit.plot.style import (
    DASHES,
    INK,
    NOTHING,
    PAPER,
    QUIET,
    WIDTH,
    arrow,
    box,
    chip,
    fold,
    rank_color,
    text_color,
    write,
)

EMPTY, ELLIPSIS = "[]", "…"  # with NOTHING, the entries of a column that are no numbers
NEW, SHARED = "#d0d0d0", PAPER
MOST_ROWS, MOST_COLUMNS, ALL_COLUMNS = 4, 8, 16
LEFT, ARROW, BLOCK_GAP, ROW_GAP, HEIGHT = 0.75, 0.55, 0.09, 0.14, 0.3  # inches
LONGEST_ARROW = 1.5  # inches, where the title is wider than the boxes
SIZES = (9.5, 8.75, 8)  # points, of numbers; smaller ones are hard to read
Origin = dict[Any, set[int]]  # the ranks that held each number of the first stage


@dataclass(frozen=True)
class Column:
    """One column of boxes: numbers, or a sign such as NOTHING."""

    block: int  # which of the rank's tensors it belongs to
    entries: tuple[Any, ...]


def tensors(
    result: Iterable[dict[str, Any]], title: str | None = None, name: str = "rank"
) -> Picture:
    """Draw what every rank holds at each stage, before → after.

    result[rank] is a dict, stage name → value, with the same names on every rank. A value is
    a tensor of at most two dimensions, a list of tensors (drawn as separate blocks), or None
    where the rank holds nothing.

    Colours show where a number comes from, by comparing values: one that a single rank held
    at the first stage has that rank's colour in every stage; one that no rank held is grey and
    bold; one that several ranks held is white. So give each rank numbers of its own, and
    sums that no rank starts with (powers of ten work). A stage of up to 16 columns is
    drawn whole if it fits, else at most eight columns and four rows: then the middle is left
    out, and the caption says so.

    name: what a holder is called if it is not a rank: "device".

    Raises PlotError if the result is empty, a rank's value is not a dict of such values, or the
    ranks have different stages.
    """
    ranks = _read(result)
    stages = list(ranks[0])
    origin = _origins([rank[stages[0]] for rank in ranks])
    title = f"What each {name} holds: " + " → ".join(stages) if title is None else title

    chip_width = 0.58 if len(name) <= 4 else 0.18 + 0.075 * len(f"{name} 0")
    edge = LEFT + chip_width - 0.58
    cells, size, width_of_box, wide = _fit(ranks, stages, WIDTH - edge)
    total = edge + sum(wide) + ARROW * (len(stages) - 1)
    tall = [HEIGHT * max(_height(cell) for cell in row) for row in cells]
    top = 0.64
    below = top + sum(tall) + ROW_GAP * len(tall)
    rows = [[f"{name} {r}", *(_cell_text(cell) for cell in row)] for r, row in enumerate(cells)]
    text_table = table(title, ["", *stages], rows, align="<")
    width = max(total, room_for(title))
    spare = (width - total) / max(1, len(stages) - 1)
    between = min(ARROW + spare, LONGEST_ARROW)
    lines = fold(_caption(stages[0], cells, origin, name), width)
    full, lower = width + 0.02, below + 0.04
    picture, ax = open_picture(title, text_table, full, lower, lines, lift=0.06, left=0)
    left = [edge + sum(wide[:s]) + between * s for s in range(len(stages))]
    for s, stage in enumerate(stages):
        write(ax, left[s], top - 0.16, stage, 9.5, color=QUIET)
        if s:
            ends = [(left[s] + x, (top + below - ROW_GAP) / 2) for x in (0.13 - between, -0.13)]
            arrow(ax, *ends, INK, 1.1, mutation_scale=11, shrinkA=2, shrinkB=2)
    y = top
    for r, row in enumerate(cells):
        chip(ax, 0, y + tall[r] / 2 - 0.11, chip_width, 0.22, r, f"{name} {r}")
        for s, cell in enumerate(row):
            top_of_cell = y + (tall[r] - HEIGHT * _height(cell)) / 2
            _draw(ax, left[s], top_of_cell, cell, width_of_box, size, origin)
        y += tall[r] + ROW_GAP
    return picture


def _read(result: Iterable[Any]) -> list[dict[str, list[Column]]]:
    """Return every rank's values as columns of numbers, by stage."""
    ranks = read_ranks(result)
    for r, value in enumerate(ranks):
        if not isinstance(value, dict) or not value:
            raise PlotError(
                f"rank {r} must return a dict of stage names and tensors, got {value!r}"
            )
        if set(value) != set(ranks[0]):
            raise PlotError(
                f"every rank must have the same stages: rank 0 has {list(ranks[0])}, "
                f"rank {r} has {list(value)}"
            )
    return [
        {stage: _columns(value, f"{stage!r} of rank {r}") for stage, value in rank.items()}
        for r, rank in enumerate(ranks)
    ]


def _columns(value: Any, where: str) -> list[Column]:
    numbers = isinstance(value, (list, tuple)) and all(isinstance(v, Number) for v in value)
    several = isinstance(value, (list, tuple)) and not numbers
    columns = []
    for block, tensor in enumerate(value if several else [value]):
        rows = _rows(tensor, where)
        columns += [Column(block, entries) for entries in zip(*rows, strict=True)]
    return columns


def _rows(tensor: Any, where: str) -> list[list[Any]]:
    if tensor is None:
        return [[NOTHING]]
    rows = tensor.tolist() if hasattr(tensor, "tolist") else tensor
    if not isinstance(rows, (list, tuple)):
        rows = [rows]
    if not rows or not isinstance(rows[0], (list, tuple)):
        rows = [rows]
    if not rows[0]:
        return [[EMPTY]]
    for row in rows:
        for entry in row:
            if isinstance(entry, (list, tuple)):
                shape = tuple(getattr(tensor, "shape", ())) or repr(tensor)
                raise PlotError(f"{where} has more than two dimensions: {shape}")
            if not isinstance(entry, Number):
                raise PlotError(f"{where} is neither a tensor nor None: {tensor!r}")
    return rows


def _origins(first: list[list[Column]]) -> Origin:
    """Return the ranks that held each number of the first stage."""
    origin: Origin = {}
    for rank, columns in enumerate(first):
        for entry in (e for column in columns for e in column.entries if not isinstance(e, str)):
            origin.setdefault(entry, set()).add(rank)
    return origin


def _elide(columns: list[Column], limit: int) -> list[Column]:
    """Return the columns without their middle: at most `limit` columns of four rows."""
    columns = [
        replace(c, entries=(*c.entries[: MOST_ROWS - 2], ELLIPSIS, c.entries[-1]))
        if len(c.entries) > MOST_ROWS
        else c
        for c in columns
    ]
    if len(columns) <= limit:
        return columns
    head, tail = columns[: limit // 2], columns[len(columns) - (limit - limit // 2 - 1) :]
    same = head[-1].block == tail[0].block
    block = head[-1].block if same else -1
    dots = Column(block, (ELLIPSIS,) * (len(head[-1].entries) if same else 1))
    return [*head, dots, *tail]


def _gaps(cell: list[Column]) -> list[int]:
    """Return the number of gaps between tensors to the left of each column."""
    changes = (left.block != right.block for left, right in itertools.pairwise(cell))
    return list(itertools.accumulate(changes, initial=0))


def number_text(entry: Any) -> str:
    """Return a number for a small box, "3" for 3.0 and "0.333" for a third, or a sign as it is."""
    if isinstance(entry, bool) or not isinstance(entry, (int, float)):
        return str(entry)
    if math.isfinite(entry) and entry == int(entry) and abs(entry) < 1e8:
        return str(int(entry))
    return f"{entry:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _cell_text(cell: list[Column]) -> str:
    """Return a cell as text: "1 2; 3 4" is a matrix, "1 2 | 3 4" two tensors."""
    blocks = []
    for _, columns in itertools.groupby(cell, key=attrgetter("block")):
        rows = zip(*(column.entries for column in columns), strict=True)
        blocks.append("; ".join(" ".join(map(number_text, row)) for row in rows))
    return " | ".join(blocks)


def _fit(ranks: list[dict[str, list[Column]]], stages: list[str], room: float):
    """Return the columns to draw so that they fit into `room` inches, and their sizes.

    Up to 16 columns are drawn where that leaves out none; else at most eight. Returns the
    columns by rank and stage, the font size in points, the widths of a box and of each stage in
    inches.
    """
    longest = max(len(columns) for rank in ranks for columns in rank.values())
    limits = [ALL_COLUMNS] * (longest <= ALL_COLUMNS) + list(range(MOST_COLUMNS, 2, -1))
    for limit, size in itertools.product(limits, SIZES):
        cells = [[_elide(rank[stage], limit) for stage in stages] for rank in ranks]
        longest_text = max(len(number_text(entry)) for entry in _entries(cells))
        box_width = max(0.34, 0.64 * longest_text * size / 72 + 0.12)
        needed = [[len(c) * box_width + _gaps(c)[-1] * BLOCK_GAP for c in row] for row in cells]
        columns = zip(stages, *needed, strict=True)
        wide = [max(0.08 * len(stage), *widths) for stage, *widths in columns]
        if sum(wide) + ARROW * (len(stages) - 1) <= room:
            break
    return cells, size, box_width, wide


def _entries(cells: list[list[list[Column]]]) -> set[Any]:
    return {e for row in cells for cell in row for column in cell for e in column.entries}


def _height(cell: list[Column]) -> int:
    return max(len(column.entries) for column in cell)


def _draw(ax: Axes, x: float, y: float, cell: list[Column], width, size, origin: Origin) -> None:
    tall = _height(cell)
    for i, (column, gap) in enumerate(zip(cell, _gaps(cell), strict=True)):
        left = x + i * width + gap * BLOCK_GAP
        top = y + (tall - len(column.entries)) * HEIGHT / 2
        for j, entry in enumerate(column.entries):
            middle = (left + width / 2, top + (j + 0.5) * HEIGHT)
            style = {"ha": "center", "color": QUIET}
            if entry in (NOTHING, EMPTY):
                edge = {"linestyle": DASHES, "zorder": 0.9}
                box(ax, left, top + j * HEIGHT, width, HEIGHT, PAPER, "#a6a6a6", **edge)
            elif entry != ELLIPSIS:
                fill = _fill(entry, origin)
                box(ax, left, top + j * HEIGHT, width, HEIGHT, fill, "#8c8c8c")
                style["color"] = text_color(fill)
                style["weight"] = "bold" if fill == NEW else "normal"
            write(ax, *middle, number_text(entry), size, **style)


def _fill(entry: Any, origin: Origin) -> str:
    holders = origin.get(entry, set())
    if len(holders) == 1:
        return rank_color(next(iter(holders)))
    return SHARED if holders else NEW


def _caption(first: str, cells, origin, name: str) -> str:
    """Return what the colours and signs that occur in this picture mean."""
    drawn = _entries(cells)
    fills = {_fill(e, origin) for e in drawn if not isinstance(e, str)}
    parts = {
        f"Colour: the one {name} that held this number at “{first}”.": fills - {NEW, SHARED},
        f"Grey and bold: a new number, held by no {name} at “{first}”.": NEW in fills,
        f"White: held by several {name}s at “{first}”.": SHARED in fills,
        "Dashed: nothing here.": drawn & {NOTHING, EMPTY},
        "The middle of longer rows is left out (…).": ELLIPSIS in drawn,
    }
    return " ".join(part for part, applies in parts.items() if applies)
