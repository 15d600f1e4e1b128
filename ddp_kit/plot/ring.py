"""The steps of a ring all-reduce: a contact sheet of small tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.colors import to_hex, to_rgb

from ddp_kit.failures import count, name_ranks
from ddp_kit.plot.numbers import table
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.style import (
    INK,
    PAPER,
    QUIET,
    box,
    fold,
    rank_color,
    text_color,
    write,
)

FEW, MANY, COMPLETE = "#eef1f4", "#8fa1b3", "#3d2a6b"  # no rank wears one of these
MOST_NUMBERS = 6  # ranks; above, a cell is too small for its digits
GAP, HEAD, TOP = 0.18, 0.25, 0.38  # inches
LABELS = 0.2  # inches, of the rank numbers to the left of a panel


def ring(result: Sequence[Any], title: str | None = None) -> Picture:
    """Draw what every rank holds after each step of a chunked ring all-reduce.

    result[rank] is a tensor of shape (2 * (n - 1) + 1, n) on n ranks: what the rank held in
    each of its n chunks before the first step and after each one. Rank r starts with 10**r
    in every chunk, so that a sum's digits name the ranks in it: 1011 is ranks 0, 1 and 3.

    A cell darkens with every rank in it and changes colour when the sum is complete; a cell
    that changed in this step is outlined in the colour of the left neighbour, who sent it.
    Above six ranks the numbers are left out, and the caption says so.

    ValueError if the result is empty, a shape is another, or a cell is not a whole number.
    """
    held = read(list(result))
    n, steps = len(held), len(held[0])
    names = step_names(n)
    complete = (10**n - 1) // 9
    if title is None:
        title = "Ring all-reduce on 1 rank: nothing to send"
        if n > 1:
            title = f"Ring all-reduce on {n} ranks, step by step"
            if all(cell == complete for rank in held for cell in rank[-1]):
                title = f"Ring all-reduce on {n} ranks: complete after {steps - 1} steps"
    changed = [
        [[s > 0 and rank[s][c] != rank[s - 1][c] for c in range(n)] for s in range(steps)]
        for rank in held
    ]
    rows = [
        [name]
        + [
            " ".join(f"{v}{'*' * c}" for v, c in zip(held[r][s], changed[r][s], strict=True))
            for r in range(n)
        ]
        for s, name in enumerate(names)
    ]
    twin = table(title, ["", *(f"rank {r}" for r in range(n))], rows, align="<")

    wide, tall, size, across = _measure(n)
    stride = max(LABELS + n * wide + GAP, 1.4)  # room for the name of a step
    bands = math.ceil(n / across)  # rows of panels a phase
    panel_rows = bands * (1 if n == 1 else 2)
    width = max(across * stride - GAP, 5.8)
    caption = fold(_caption(n), width)
    below = TOP + panel_rows * (HEAD + n * tall + GAP) + 0.16
    picture = Picture(width, below + 0.17 * len(caption) - 0.08, twin)
    ax = picture.sheet()
    write(ax, 0, 0.12, title, 11.5, weight="bold")
    for step, name in enumerate(names):
        # The first all-gather stands below the first reduce-scatter; the key fills the gap.
        slot = step if step < n else bands * across + step - n + 1
        x = LABELS + slot % across * stride
        y = TOP + HEAD + slot // across * (HEAD + n * tall + GAP)
        write(ax, x, y - 0.13, name, 9, color=INK)
        for r in range(n):
            if r % math.ceil(0.12 / tall) == 0:
                write(ax, x - 0.06, y + (r + 0.5) * tall, str(r), 8, color=QUIET, ha="right")
            box(ax, x - 0.05, y + r * tall + 0.02, 0.03, tall - 0.04, rank_color(r), "none")
            for c in range(n):
                value = held[r][step][c]
                place = (x + c * wide, y + r * tall)
                text = str(value) if n <= MOST_NUMBERS else ""
                _cell(ax, *place, wide, tall, fill(value, n), text, size)
                if changed[r][step][c]:
                    outline(ax, *place, wide, tall, rank_color((r - 1) % n))
    if n > 1:
        _key(ax, 0.02, TOP + HEAD + bands * (HEAD + n * tall + GAP), n)
    for i, line in enumerate(caption):
        write(ax, 0, below - 0.06 + 0.17 * i, line, 8.5, color=QUIET)
    return picture


def step_names(n: int) -> list[str]:
    """Name what a ring of n ranks holds: at the start, and after each of its 2 * (n - 1) steps."""
    return ["start", *(f"{p} {i}" for p in ("reduce-scatter", "all-gather") for i in range(1, n))]


def read(values: list[Any]) -> list[list[list[int]]]:
    """Return held[rank][step][chunk] as whole numbers."""
    n = len(values)
    if not n:
        raise ValueError("the result is empty: there is no rank to draw")
    expected = (2 * (n - 1) + 1, n)
    for rank, value in enumerate(values):
        shape = tuple(getattr(value, "shape", ()))
        if shape != expected:
            got = f"shape {shape}" if hasattr(value, "shape") else repr(value)
            wanted = f"a tensor of shape {expected} on {count(n, 'rank')}"
            raise ValueError(f"rank {rank} must give {wanted}, got {got}")
    held = [value.tolist() for value in values]
    for rank, steps in enumerate(held):
        for cell in (cell for step in steps for cell in step):
            if not math.isfinite(cell) or cell != int(cell) or cell < 0:
                raise ValueError(f"rank {rank} holds {cell}, which is no sum of powers of ten")
    return [[[int(cell) for cell in step] for step in steps] for steps in held]


def _measure(n: int) -> tuple[float, float, float, int]:
    """Return a cell's width and height in inches, its type in points, and panels in a row."""
    if n <= 4:
        return max(0.3, 0.1 * n + 0.02), 0.27, 9, n
    if n <= MOST_NUMBERS:
        return {5: (0.425, 0.25, 8.2, 3), 6: (0.45, 0.25, 7.3, 3)}[n]
    side = 1.7 if n <= 8 else 1.05
    return side / n, side / n, 0, 4 if n <= 8 else 6


def fill(value: int, n: int) -> str:
    """Return the colour of a cell: darker with every rank in it."""
    have = str(value).count("1")
    if value == (10**n - 1) // 9:
        return COMPLETE
    if have == 0:
        return PAPER
    share = (have - 1) / max(1, n - 2)
    return to_hex([a + (b - a) * share for a, b in zip(to_rgb(FEW), to_rgb(MANY), strict=True)])


def _cell(ax, x, y, wide, tall, color, text, size) -> None:
    box(ax, x, y, wide, tall, color, PAPER, linewidth=1)
    if text:
        write(ax, x + wide / 2, y + tall / 2, text, size, color=text_color(color), ha="center")


def outline(ax, x, y, wide, tall, color) -> None:
    """Outline a cell that has just changed."""
    inset = 0.022
    edge = {"linewidth": 1.8 if wide > 0.15 else 1.1, "joinstyle": "miter"}
    box(ax, x + inset, y + inset, wide - 2 * inset, tall - 2 * inset, "none", color, **edge)


def _key(ax, x: float, y: float, n: int) -> None:
    """Say what shade and outline mean, in the place of the panel that is not there."""
    counts = [1, 2, n - 1] if n > 3 else list(range(1, n))
    entries = [(int("1" * many), count(many, "rank")) for many in counts]
    if n > 4:
        entries[-1] = (entries[-1][0], f"… {n - 1} ranks")
    entries.append((int("1" * n), "complete"))
    for i, (value, text) in enumerate(entries):
        top = y + i * 0.22
        box(ax, x, top, 0.24, 0.18, fill(value, n), "none")
        write(ax, x + 0.32, top + 0.09, text, 8.5, color=INK)
    top = y + len(entries) * 0.22
    outline(ax, x, top, 0.24, 0.18, rank_color(0))
    write(ax, x + 0.32, top + 0.09, "from rank 0", 8.5, color=INK)


def _caption(n: int) -> str:
    digits = {1: "1", 2: "11", 3: "101"}.get(n, "1011")
    summed = name_ranks(i for i, digit in enumerate(reversed(digits)) if digit == "1")
    said = (
        f"Rows: ranks; columns: chunks; a number's digits name the ranks in it ({digits}: {summed})"
    )
    if n > MOST_NUMBERS:
        said = f"Rows: ranks; columns: chunks; numbers left out above {MOST_NUMBERS} ranks"
    if n > 1:
        said += "; an outlined cell has just come from the left neighbour, whose colour it wears"
    return said + "."
