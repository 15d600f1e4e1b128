"""The numbers of every rank and stage, as columns of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

from ddp_kit.plot.numbers import short

NOTHING, EMPTY, ELLIPSIS = "\N{EN DASH}", "[]", "…"  # what stands in a box without a number
MOST_ROWS = 4


@dataclass(frozen=True)
class Column:
    """One column of boxes: numbers, or one of the signs above."""

    block: int  # which of the rank's tensors it belongs to
    entries: tuple[Any, ...]


def read(result: Sequence[Any]) -> list[dict[str, list[Column]]]:
    """Turn every rank's values into columns of numbers."""
    ranks = list(result)
    if not ranks:
        raise ValueError("the result is empty: there is no rank to draw")
    for r, value in enumerate(ranks):
        if not isinstance(value, dict) or not value:
            raise ValueError(f"rank {r} must give a dict of stage name to tensor, got {value!r}")
        if set(value) != set(ranks[0]):
            raise ValueError(
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
                raise ValueError(f"{where} has more than two dimensions: {shape}")
            if not isinstance(entry, Number):
                raise ValueError(f"{where} is neither a tensor nor None: {tensor!r}")
    return rows


def origins(first: list[list[Column]]) -> dict[Any, set[int]]:
    """Map each number of the first stage to the ranks that held it."""
    origin: dict[Any, set[int]] = {}
    for rank, columns in enumerate(first):
        for column in columns:
            for entry in column.entries:
                if not isinstance(entry, str):
                    origin.setdefault(entry, set()).add(rank)
    return origin


def elide(columns: list[Column], limit: int) -> list[Column]:
    """Leave out the middle, so that at most `limit` columns of four rows remain."""
    columns = [Column(column.block, _elide_rows(column.entries)) for column in columns]
    if len(columns) <= limit:
        return columns
    head, tail = columns[: limit // 2], columns[len(columns) - (limit - limit // 2 - 1) :]
    same = head[-1].block == tail[0].block
    block = head[-1].block if same else -1
    dots = Column(block, (ELLIPSIS,) * (len(head[-1].entries) if same else 1))
    return [*head, dots, *tail]


def _elide_rows(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(entries) <= MOST_ROWS:
        return entries
    return (*entries[: MOST_ROWS - 2], ELLIPSIS, entries[-1])


def gaps(cell: list[Column]) -> list[int]:
    """Count the gaps between tensors to the left of each column."""
    counts, count = [], 0
    for i, column in enumerate(cell):
        count += i > 0 and column.block != cell[i - 1].block
        counts.append(count)
    return counts


def entry_text(entry: Any) -> str:
    """Write a number, or the sign that stands for none."""
    return entry if isinstance(entry, str) else short(entry)


def cell_text(cell: list[Column]) -> str:
    """Write a cell as text: "1 2; 3 4" is a matrix, "1 2 | 3 4" two tensors."""
    places = gaps(cell)
    blocks = []
    for gap in range(places[-1] + 1):
        columns = [c.entries for c, g in zip(cell, places, strict=True) if g == gap]
        rows = zip(*columns, strict=True)
        blocks.append("; ".join(" ".join(entry_text(e) for e in row) for row in rows))
    return " | ".join(blocks)
