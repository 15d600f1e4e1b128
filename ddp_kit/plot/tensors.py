"""What every rank holds, as boxes of numbers: tensors of its own, or its part of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from ddp_kit.error_text import count
from ddp_kit.errors import PlotError
from ddp_kit.plot import style
from ddp_kit.plot.picture import Picture, open_picture, plain, read_ranks, table
from ddp_kit.plot.style import DASHES, INK, NOTHING, PAPER, QUIET, WIDTH, box, write

EMPTY, ELLIPSIS = "[]", "…"  # with NOTHING, the entries of a column that are no numbers
NEW, SHARED = "#d0d0d0", PAPER
MOST_ROWS, MOST_COLUMNS, ALL_COLUMNS = 4, 8, 16
ARROW, BLOCK_GAP, ROW_GAP, HEIGHT = 0.55, 0.09, 0.14, 0.3  # inches
ALL, NONE_OF_IT, PARTIAL = "all", "nothing", "a partial sum"  # of a tensor that ranks share
MOST_NUMBERS = 8  # rows or columns of such a tensor
LOW = 0.24  # inches of its rows
GAP, LABEL = 0.3, 0.42  # inches: between ranks, above a tensor
NARROW = 1.2  # inches: as wide as the names above a tensor
TOP = 0.36  # inches, below the title
EDGE = "#8c8c8c"
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
    first = [rank[stages[0]] for rank in ranks]
    origin = _origins([e for column in columns for e in column.entries] for columns in first)
    title = f"What each {name} holds: " + " → ".join(stages) if title is None else title

    chip = 0.13 + 0.075 * len(f"{name} 0")  # inches
    edge, top = chip + 0.17, 0.64
    cells, size, width_of_box, wide = _fit(ranks, stages, WIDTH - edge)
    tall = [HEIGHT * max(_height(cell) for cell in row) for row in cells]
    below = top + sum(tall) + ROW_GAP * len(tall)
    rows = [[f"{name} {r}", *(_cell_text(cell) for cell in row)] for r, row in enumerate(cells)]
    text_table = table(title, ["", *stages], rows, align="<")
    width = edge + sum(wide) + ARROW * (len(stages) - 1)
    caption = _caption(stages[0], cells, origin, name)
    picture, ax = open_picture(title, text_table, width + 0.02, below + 0.04, caption)
    left = [edge + sum(wide[:s]) + ARROW * s for s in range(len(stages))]
    for s, stage in enumerate(stages):
        write(ax, left[s], top - 0.16, stage, 9.5, color=QUIET)
        if s:
            ends = [(left[s] + x, (top + below - ROW_GAP) / 2) for x in (0.1 - ARROW, -0.1)]
            style.arrow(ax, *ends, INK, 1.1, mutation_scale=11)
    y = top
    for r, row in enumerate(cells):
        style.chip(ax, 0, y + tall[r] / 2, chip, r, f"{name} {r}")
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
    rows = _matrix(tensor, where)
    return rows.tolist() if rows.size else [[EMPTY]]


def _origins(first: Iterable[Iterable[Any]]) -> Origin:
    """Return the ranks that held each number; first: those of each rank at the first stage."""
    origin: Origin = {}
    for rank, entries in enumerate(first):
        for entry in entries:
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
            place = left, top + j * HEIGHT, width, HEIGHT
            if not isinstance(entry, str):
                _number_box(ax, *place, entry, _fill(entry, origin), size)
                continue
            if entry != ELLIPSIS:
                box(ax, *place, PAPER, "#a6a6a6", linestyle=DASHES, zorder=0.9)
            middle = left + width / 2, top + (j + 0.5) * HEIGHT
            write(ax, *middle, entry, size, ha="center", color=QUIET)


def _number_box(ax: Axes, x: float, y: float, w: float, h: float, entry, fill: str, size) -> None:
    box(ax, x, y, w, h, fill, EDGE)
    weight = "bold" if fill == NEW else "normal"
    look = {"ha": "center", "color": style.text_color(fill), "weight": weight}
    write(ax, x + w / 2, y + h / 2, number_text(entry), size, **look)


def _fill(entry: Any, origin: Origin) -> str:
    holders = origin.get(entry, set())
    if len(holders) == 1:
        return style.rank_color(next(iter(holders)))
    return SHARED if holders else NEW


def _caption(first: str, cells, origin, name: str) -> str:
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


# ---- the parts of one tensor


class Part(NamedTuple):
    """What a rank holds: its name, where that is in the tensor, and its numbers.

    name: as an index, "[0:2, :]", or ALL, NONE_OF_IT or PARTIAL. place: first row, first column.
    """

    name: str
    place: tuple[int, int]
    numbers: np.ndarray  # of two dimensions


def placements(
    result: Iterable[Any],
    whole: Any,
    mesh: Sequence[int] | None = None,
    names: Sequence[str] = (),
    title: str | None = None,
) -> Picture:
    """Draw which part of a tensor each rank holds, at one stage or at several.

    result[rank] is the tensor that a rank holds, or a dict, stage name -> tensor, with the same
    names on every rank. whole: the tensor that they make up, of at most two dimensions. Its entries
    must differ, as in `torch.arange`, because a part is found in it by value. A rank whose tensor
    has the shape of the whole but other values holds a partial sum of it.

    mesh: its shape, (2, 2) for four ranks in two rows; by default, all are in one row. names: of
    its dimensions.

    At several stages, colours show where a number comes from: an entry of the tensor that a single
    rank held at the first stage has that rank's colour in every stage; one that no rank held, such
    as a sum, is grey and bold; one that several ranks held is white. At one stage, a part has the
    colour of the lowest rank that holds it: equal parts have equal colours.

    Raises PlotError if a rank's tensor is no part of the whole, or is in several places of it, or
    if the whole has more than eight rows or columns.
    """
    ranks = read_ranks(result)
    stages = list(ranks[0]) if isinstance(ranks[0], dict) else [""]
    ranks = [rank if isinstance(rank, dict) else {"": rank} for rank in ranks]
    if any(list(rank) != stages for rank in ranks):
        raise PlotError("every rank must have the same stages, in the same order")
    shape = tuple(mesh) if mesh else (len(ranks),)
    if len(shape) > 2 or math.prod(shape) != len(ranks):
        raise PlotError(
            f"mesh must have a place for each of {count(len(ranks), 'rank')} and at most two "
            f"dimensions, got {shape}"
        )
    tensor = _matrix(whole, "the whole tensor")
    if max(tensor.shape) > MOST_NUMBERS:
        raise PlotError(
            f"a tensor of at most {MOST_NUMBERS} rows and columns can be drawn, got {tensor.shape}"
        )
    parts = {
        stage: [_find(rank[stage], tensor, r) for r, rank in enumerate(ranks)] for stage in stages
    }
    title = "Which rank holds which part of the tensor" if title is None else title
    rows = [
        [f"rank {r}", *(_part_text(parts[stage][r]) for stage in stages)] for r in range(len(ranks))
    ]
    header = ["", *(stage or "holds" for stage in stages)]
    text_table = table(title, header, rows, align="<")

    named = len(shape) == 2 and bool(names)
    left = 0.35 if named else 0.0
    room = WIDTH - left if len(shape) == 1 else (WIDTH - left + GAP) / shape[1] - GAP
    numbers = (n for held in parts.values() for part in held for n in part.numbers.flat)
    longest = max((len(number_text(n)) for n in numbers), default=1)
    wide = min(tensor.shape[1] * max(0.26, 0.64 * longest * SIZES[1] / 72 + 0.1), room)
    tall = tensor.shape[0] * LOW
    step, drop = max(wide, min(NARROW, room)) + GAP, LABEL + tall + 0.12
    fitting = max(1, int((WIDTH + GAP) / step))  # ranks side by side, where the mesh is one row
    across = shape[1] if len(shape) == 2 else min(shape[0], fitting)
    lines = -(-len(ranks) // across)
    head = 0.22 if any(parts) or names else 0.0
    stage_height = head + lines * drop + 0.2
    origin = None  # of numbers, if there are several stages; else colours are those of parts
    if len(parts) > 1:
        origin = _origins(map(_solid, next(iter(parts.values()))))
    caption = _parts_caption(parts, origin)
    below = TOP + len(parts) * stage_height - 0.1
    picture, sheet = open_picture(
        title, text_table, left + across * step - GAP + 0.02, below, caption
    )
    for number, (stage, held) in enumerate(parts.items()):
        y = TOP + number * stage_height
        if number:
            style.arrow(sheet, (0.25, y - 0.2), (0.25, y + 0.1), INK, 1.1, mutation_scale=11)
        if head:
            label = stage + (f"   {names[-1]} \N{RIGHTWARDS ARROW}" if names else "")
            write(sheet, 0.45 if number else left, y + 0.1, label, 9.5, color=QUIET)
        if named:
            middle = y + head + lines * drop / 2
            text = f"\N{LEFTWARDS ARROW} {names[0]}"
            write(sheet, 0.12, middle, text, 9.5, color=QUIET, ha="center", rotation=90)
        colors = _colors(held)
        for r, part in enumerate(held):
            corner = left + r % across * step, y + head + r // across * drop
            color = style.blend(colors[r], PAPER, 0.7) if part.name == PARTIAL else colors[r]
            found = None if part.name == PARTIAL else origin
            _tensor(sheet, corner, (wide, tall), part, tensor.shape, r, color, found)
    return picture


def _matrix(values: Any, what: str) -> np.ndarray:
    """Return a tensor as a matrix: one dimension becomes a row, none a single number."""
    numbers = np.asarray(plain(values))
    if numbers.dtype.kind not in "biuf" or numbers.ndim > 2:
        raise PlotError(f"{what} must be a tensor of at most two dimensions, got {values!r}")
    return numbers.reshape(1, -1) if numbers.ndim < 2 else numbers


def _find(values: Any, whole: np.ndarray, rank: int) -> Part:
    held = np.zeros((0, 0)) if values is None else _matrix(values, f"what rank {rank} holds")
    if not held.size:
        return Part(NONE_OF_IT, (0, 0), held)
    if held.shape == whole.shape:
        return Part(ALL if _close(held, whole) else PARTIAL, (0, 0), held)
    rows, columns = held.shape
    places = [
        (i, j)
        for i in range(whole.shape[0] - rows + 1)
        for j in range(whole.shape[1] - columns + 1)
        if _close(held, whole[i : i + rows, j : j + columns])
    ]
    if len(places) != 1:
        raise PlotError(
            f"rank {rank} holds a tensor of shape {held.shape} that is in {len(places) or 'no'} "
            f"place{'s' * (len(places) > 1)} of the whole tensor of shape {whole.shape}"
        )
    ((i, j),) = places
    spans = _span(i, rows, whole.shape[0]), _span(j, columns, whole.shape[1])
    name = spans[1] if whole.shape[0] == 1 else ", ".join(spans)
    return Part(f"[{name}]", (i, j), held)


def _close(held: np.ndarray, whole: np.ndarray) -> bool:
    return bool(np.allclose(held, whole, rtol=1e-5, atol=1e-8))


def _span(begin: int, length: int, of: int) -> str:
    return ":" if length == of else f"{begin}:{begin + length}"


def _part_text(part: Part) -> str:
    """Return a part as text: "[0:1, :]  1 2 3 4"."""
    if part.name == NONE_OF_IT:
        return NONE_OF_IT
    rows = (" ".join(map(number_text, row)) for row in part.numbers.tolist())
    return f"{part.name} = {'; '.join(rows)}"


def _colors(held: list[Part]) -> list[str]:
    """Return the colour of each rank's part: that of the lowest rank with the same one."""
    first: dict[tuple, int] = {}
    for r, part in enumerate(held):
        first.setdefault((*part[:2], part.numbers.tobytes()), r)
    return [style.rank_color(first[(*part[:2], part.numbers.tobytes())]) for part in held]


def _solid(part: Part) -> list[Any]:
    """Return the numbers of the tensor that a rank holds, and no partial sums of them."""
    return part.numbers.ravel().tolist() if part.name != PARTIAL else []


def _tensor(
    ax: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    part: Part,
    shape: tuple[int, ...],
    rank: int,
    color: str,
    origin: Origin | None,
) -> None:
    """Draw the outline of the tensor, and in it what a rank holds, in `color` or by its origin."""
    (x, y), (wide, tall) = corner, size
    style.chip(ax, x, y + 0.1, 0.58, rank, f"rank {rank}")
    name = part.name if part.name not in (PARTIAL, NONE_OF_IT) else ""
    if part.name == PARTIAL:
        name = "+" if rank else ""
    write(ax, x + 0.66, y + 0.1, name, 8.5, color=QUIET)
    y += LABEL - 0.14
    box(ax, x, y, wide, tall, PAPER, "#a6a6a6", linestyle=DASHES, zorder=0.9)
    if part.name == NONE_OF_IT:
        write(ax, x + wide / 2, y + tall / 2, NONE_OF_IT, 8.5, color=QUIET, ha="center")
        return
    cell, height = wide / shape[1], tall / shape[0]
    left, top = x + part.place[1] * cell, y + part.place[0] * height
    for (i, j), number in np.ndenumerate(part.numbers):
        fill = color if origin is None else _fill(number.item(), origin)
        at = left + j * cell, top + i * height
        _number_box(ax, *at, cell, height, number.item(), fill, SIZES[1])


def _parts_caption(parts: dict[str, list[Part]], origin: Origin | None) -> str:
    found = {part.name for held in parts.values() for part in held}
    solid = {number for held in parts.values() for part in held for number in _solid(part)}
    fills = {_fill(number, origin) for number in solid} if origin is not None else set()
    first = next(iter(parts))
    texts = {
        "Colour: the lowest rank that holds this part.": solid and origin is None,
        f"Colour: the one rank that held this number at “{first}”.": fills - {NEW, SHARED},
        f"Grey and bold: a new number, held by no rank at “{first}”.": NEW in fills,
        f"White: held by several ranks at “{first}”.": SHARED in fills,
        "Dashed: the rest of the tensor, which the rank does not hold.": found - {ALL, PARTIAL},
        "Pale: a partial sum; the tensor is the sum over the ranks.": PARTIAL in found,
    }
    return " ".join(text for text, applies in texts.items() if applies)
