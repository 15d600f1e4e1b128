"""Which part of a tensor each rank holds, found by its values: the tensor once for each rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from ddp_kit.error_text import count
from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import Picture, open_picture, plain, read_ranks, room_for, table
from ddp_kit.plot.style import (
    DASHES,
    INK,
    PAPER,
    QUIET,
    WIDTH,
    arrow,
    blend,
    box,
    chip,
    fold,
    rank_color,
    text_color,
    write,
)
from ddp_kit.plot.tensors import NEW, SHARED, number_text

ALL, NOTHING, SUMMAND = "all", "nothing", "a summand"
MOST = 8  # rows or columns whose numbers are drawn; a larger tensor is an outline
HEIGHT, SIZE = 0.24, 8.5  # inches of a row, points of a number
FRAME = (1.25, 0.9)  # inches of a tensor that is drawn as an outline
GAP, BETWEEN, LABEL = 0.3, 0.5, 0.42  # inches: between ranks, between stages, above a tensor
NARROW = 1.2  # inches: as wide as the names above a tensor
TOP = 0.36  # inches, below the title
NO_RANK, SEVERAL = -1, -2  # where the rank that held an entry at the first stage would be


class Part(NamedTuple):
    """What a rank holds: its name, where that is in the tensor, and its numbers.

    name: as an index, "[0:2, :]", or ALL, NOTHING or SUMMAND. place: first row, first column.
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
    has the shape of the whole but other values holds a summand of it.

    mesh: its shape, (2, 2) for four ranks in two rows; by default, all are in one row. names: of
    its dimensions. Up to eight rows and columns are drawn with their numbers.

    At several stages, colours show where a number comes from: an entry of the tensor that a single
    rank held at the first stage has that rank's colour in every stage; one that no rank held, such
    as a sum, is grey and bold; one that several ranks held is white. At one stage, a part has the
    colour of the lowest rank that holds it, so equal parts have equal colours.

    Raises PlotError if a rank's tensor is no part of the whole, or is in several places of it.
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
    parts = {
        stage: [_find(rank[stage], tensor, r) for r, rank in enumerate(ranks)] for stage in stages
    }
    title = "Which rank holds which part of the tensor" if title is None else title
    rows = [
        [f"rank {r}", *(_cell_text(parts[stage][r]) for stage in stages)] for r in range(len(ranks))
    ]
    header = ["", *(stage or "holds" for stage in stages)]
    text_table = table(title, header, rows, align="<")
    return _draw(title, text_table, parts, tensor, shape, tuple(names))


def _matrix(values: Any, what: str) -> np.ndarray:
    """Return a tensor as a matrix: one dimension becomes a row, none a single number."""
    numbers = np.asarray(plain(values))
    if numbers.dtype.kind not in "biuf" or numbers.ndim > 2:
        raise PlotError(f"{what} must be a tensor of at most two dimensions, got {values!r}")
    return numbers.reshape(1, -1) if numbers.ndim < 2 else numbers


def _find(values: Any, whole: np.ndarray, rank: int) -> Part:
    """Return which part of the whole a rank's tensor is."""
    held = np.zeros((0, 0)) if values is None else _matrix(values, f"what rank {rank} holds")
    if not held.size:
        return Part(NOTHING, (0, 0), held)
    if held.shape == whole.shape:
        return Part(ALL if _close(held, whole) else SUMMAND, (0, 0), held)
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


def _cell_text(part: Part) -> str:
    """Return a part as text: "[0:1, :]  1 2 3 4"."""
    if part.name == NOTHING:
        return NOTHING
    if max(part.numbers.shape) > MOST:
        return part.name
    rows = (" ".join(map(number_text, row)) for row in part.numbers.tolist())
    return f"{part.name} = {'; '.join(rows)}"


def _draw(
    title: str,
    text_table: str,
    parts: dict[str, list[Part]],
    whole: np.ndarray,
    mesh: tuple[int, ...],
    names: tuple[str, ...],
) -> Picture:
    named = len(mesh) == 2 and bool(names)
    left = 0.35 if named else 0.0
    room = WIDTH - left if len(mesh) == 1 else (WIDTH - left + GAP) / mesh[1] - GAP
    numbered, (wide, tall) = _size(parts, whole.shape, room)
    step, drop = max(wide, min(NARROW, room)) + GAP, LABEL + tall + 0.12
    fitting = max(1, int((WIDTH + GAP) / step))  # ranks side by side, where the mesh is one row
    across = mesh[1] if len(mesh) == 2 else min(mesh[0], fitting)
    lines = -(-math.prod(mesh) // across)
    head = 0.22 if any(parts) or names else 0.0
    width_of_stage, height_of_stage = left + across * step - GAP, head + lines * drop
    several = len(parts)
    beside = len(mesh) == 2 and several * (width_of_stage + BETWEEN) - BETWEEN <= WIDTH
    total = several * (width_of_stage + BETWEEN) - BETWEEN if beside else width_of_stage
    below = TOP + (height_of_stage if beside else several * (height_of_stage + 0.2) - 0.2)
    width = max(total, room_for(title))
    origin = _origin(next(iter(parts.values())), whole.shape) if several > 1 else None
    caption = fold(_caption(parts, numbered, origin), width)
    picture, sheet = open_picture(title, text_table, width + 0.02, below + 0.1, caption, lift=0.08)
    for number, (stage, held) in enumerate(parts.items()):
        x = number * (width_of_stage + BETWEEN) if beside else 0.0
        y = TOP if beside else TOP + number * (height_of_stage + 0.2)
        if number:
            ends = [(x - 0.42, y + height_of_stage / 2), (x - 0.1, y + height_of_stage / 2)]
            if not beside:
                ends = [(0.25, y - 0.2), (0.25, y + 0.1)]
            arrow(sheet, *ends, INK, 1.1, mutation_scale=11)
        if head:
            at = x + left if beside or not number else 0.45
            label = stage + (f"   {names[-1]} \N{RIGHTWARDS ARROW}" if names else "")
            write(sheet, at, y + 0.1, label, 9.5, color=QUIET)
        if named:
            middle = y + head + lines * drop / 2
            text = f"\N{LEFTWARDS ARROW} {names[0]}"
            write(sheet, x + 0.12, middle, text, 9.5, color=QUIET, ha="center", rotation=90)
        colors = _colors(held)
        for r, part in enumerate(held):
            corner = x + left + r % across * step, y + head + r // across * drop
            fills = _fills(part, colors[r], origin)
            _tensor(sheet, corner, (wide, tall), part, whole.shape, r, fills, numbered)
    return picture


def _size(
    parts: dict[str, list[Part]], shape: tuple[int, ...], room: float
) -> tuple[bool, tuple[float, float]]:
    """Return whether numbers are drawn, and the inches of a whole tensor, at most `room` wide."""
    numbers = (n for held in parts.values() for part in held for n in part.numbers.flat)
    if max(shape) <= MOST:
        longest = max((len(number_text(n)) for n in numbers), default=1)
        cell = max(0.26, 0.64 * longest * SIZE / 72 + 0.1)
        if shape[1] * cell <= room:
            return True, (shape[1] * cell, shape[0] * HEIGHT)
    return False, (min(FRAME[0], room), FRAME[1])


def _colors(held: list[Part]) -> list[str]:
    """Return the colour of each rank's part: that of the lowest rank with the same one."""
    first: dict[tuple, int] = {}
    for r, part in enumerate(held):
        first.setdefault((*part[:2], part.numbers.tobytes()), r)
    return [rank_color(first[(*part[:2], part.numbers.tobytes())]) for part in held]


def _origin(first: list[Part], shape: tuple[int, ...]) -> np.ndarray:
    """Return which rank held each entry of the tensor at the first stage, NO_RANK or SEVERAL."""
    origin = np.full(shape, NO_RANK)
    for r, part in enumerate(first):
        if part.name not in (SUMMAND, NOTHING):
            held = _entries(origin, part)
            held[...] = np.where(held == NO_RANK, r, SEVERAL)
    return origin


def _entries(tensor: np.ndarray, part: Part) -> np.ndarray:
    """Return what is in a tensor where a part is."""
    (i, j), (rows, columns) = part.place, part.numbers.shape
    return tensor[i : i + rows, j : j + columns]


def _fills(part: Part, color: str, origin: np.ndarray | None) -> list[tuple[slice, slice, str]]:
    """Return the blocks of one colour that make up a part: their rows, columns and colour."""
    if part.name == NOTHING:
        return []
    if part.name == SUMMAND or origin is None:
        fill = blend(color, PAPER, 0.7) if part.name == SUMMAND else color
        return [(slice(0, part.numbers.shape[0]), slice(0, part.numbers.shape[1]), fill)]
    held = _entries(origin, part)
    blocks = itertools.product(_runs(held), _runs(held.T))
    return [(i, j, _fill(int(held[i.start, j.start]))) for i, j in blocks]


def _runs(lines: np.ndarray) -> list[slice]:
    """Return the runs of equal lines of an array."""
    cuts = np.flatnonzero((lines[1:] != lines[:-1]).any(axis=1)) + 1
    return list(map(slice, [0, *cuts.tolist()], [*cuts.tolist(), len(lines)]))


def _fill(rank: int) -> str:
    return {NO_RANK: NEW, SEVERAL: SHARED}.get(rank) or rank_color(rank)


def _tensor(
    ax: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    part: Part,
    shape: tuple[int, ...],
    rank: int,
    fills: list[tuple[slice, slice, str]],
    numbered: bool,
) -> None:
    """Draw the outline of the tensor, and in it what a rank holds."""
    (x, y), (wide, tall) = corner, size
    chip(ax, x, y, 0.58, 0.2, rank, f"rank {rank}")
    name = part.name if part.name not in (SUMMAND, NOTHING) else ""
    if part.name == SUMMAND:
        name = "+" if rank else ""
    write(ax, x + 0.66, y + 0.1, name, 8.5, color=QUIET)
    y += LABEL - 0.14
    box(ax, x, y, wide, tall, PAPER, "#a6a6a6", linestyle=DASHES, zorder=0.9)
    if part.name == NOTHING:
        write(ax, x + wide / 2, y + tall / 2, NOTHING, 8.5, color=QUIET, ha="center")
        return
    cell, height = wide / shape[1], tall / shape[0]
    left, top = x + part.place[1] * cell, y + part.place[0] * height
    for rows, columns, fill in fills:
        at = left + columns.start * cell, top + rows.start * height
        block = part.numbers[rows, columns]
        if not numbered:
            box(ax, *at, block.shape[1] * cell, block.shape[0] * height, fill, "#8c8c8c")
            continue
        style = {"ha": "center", "color": text_color(fill)}
        style["weight"] = "bold" if fill == NEW else "normal"
        for (i, j), number in np.ndenumerate(block):
            corner = at[0] + j * cell, at[1] + i * height
            box(ax, *corner, cell, height, fill, "#8c8c8c", linewidth=0.6)
            middle = corner[0] + cell / 2, corner[1] + height / 2
            write(ax, *middle, number_text(number.item()), SIZE, **style)


def _caption(parts: dict[str, list[Part]], numbered: bool, origin: np.ndarray | None) -> str:
    """Return what the colours and outlines that occur in this picture mean."""
    found = {part.name for held in parts.values() for part in held}
    solid = [p for held in parts.values() for p in held if p.name not in (SUMMAND, NOTHING)]
    held = [] if origin is None else [_entries(origin, part) for part in solid]
    ranks = {rank for entries in held for rank in np.unique(entries).tolist()}
    first = next(iter(parts))
    texts = {
        "Colour: the lowest rank that holds this part.": solid and origin is None,
        f"Colour: the one rank that held this number at “{first}”.": ranks - {NO_RANK, SEVERAL},
        f"Grey and bold: a new number, held by no rank at “{first}”.": NO_RANK in ranks,
        f"White: held by several ranks at “{first}”.": SEVERAL in ranks,
        "Dashed: the rest of the tensor, which the rank does not hold.": found - {ALL, SUMMAND},
        "Pale: a summand; the tensor is the sum over the ranks.": SUMMAND in found,
        "The tensor is too large for its numbers.": not numbered,
    }
    return " ".join(text for text, applies in texts.items() if applies)
