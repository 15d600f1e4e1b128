"""The steps of a ring all-reduce: all of them as small tables, or one with its messages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes

from ddp_kit.error_text import count, name_ranks
from ddp_kit.errors import PlotError
from ddp_kit.plot import style
from ddp_kit.plot.picture import Picture, open_picture, read_ranks, read_trace, table
from ddp_kit.plot.style import PAPER, QUIET, box, write

FEW, MANY, COMPLETE = "#eef1f4", "#8fa1b3", "#3d2a6b"  # no rank has one of these
MOST, MOST_IN_STEP = 6, 8  # ranks in `ring` and in `ring_step`; above, the numbers do not fit
Held = list[list[list[int]]]  # by rank, step and chunk


def ring(result: Iterable[Any], title: str | None = None) -> Picture:
    """Draw what every rank holds after each step of a chunked ring all-reduce.

    result[rank] is a tensor of shape (2 * (n - 1) + 1, n) on n ranks: what the rank held in
    each of its n chunks before the first step and after each one. Rank r starts with 10**r
    in every chunk, so that a sum's digits name the ranks in it: 1011 is ranks 0, 1 and 3.

    More ranks make a cell darker, and a complete sum has a colour of its own; a cell that changed
    in this step is outlined in the colour of the left neighbour, which sent it, and an arrow leads
    into it: a chunk, which is a column, moves down by one rank from panel to panel.

    Raises PlotError if the result is empty or a shape is wrong, or for more than 6 ranks.
    """
    held = _read(result, MOST)
    n, steps = len(held), len(held[0])
    names = _step_names(n)
    if title is None:
        title = "Ring all-reduce on 1 rank: nothing to send"
        if n > 1:
            title = f"Ring all-reduce on {n} ranks, step by step"
            if all(cell == _complete(n) for rank in held for cell in rank[-1]):
                title = f"Ring all-reduce on {n} ranks: complete after {steps - 1} steps"
    changed = [_changed(held, step) for step in range(steps)]
    rows = [
        [name, *(_chunks(held[r][s], changed[s][r]) for r in range(n))]
        for s, name in enumerate(names)
    ]
    text_table = table(title, ["", *(f"rank {r}" for r in range(n))], rows, align="<")

    gap, top, labels, head = 0.18, 0.38, 0.2, 0.42  # inches; labels: the numbers of ranks
    wide, tall, size, across = _measure(n)
    stride = max(labels + n * wide + gap, 1.4)  # room for the name of a step
    bands = math.ceil(n / across)  # rows of panels per phase
    panel = head + n * tall + gap
    below = top + bands * (1 if n == 1 else 2) * panel + 0.16 - 0.08
    picture, ax = open_picture(title, text_table, across * stride - gap, below, _caption(n))
    for step, name in enumerate(names):
        # The first all-gather is below the first reduce-scatter; the key fills the gap.
        slot = step if step < n else bands * across + step - n + 1
        x = labels + slot % across * stride
        y = top + head + slot // across * panel
        write(ax, x, y + 0.12 - head, name)
        for c in range(n):
            write(ax, x + (c + 0.5) * wide, y - 0.11, str(c), 7.5, color=QUIET, ha="center")
        for r in range(n):
            write(ax, x - 0.06, y + (r + 0.5) * tall, str(r), 8, color=QUIET, ha="right")
            box(ax, x - 0.05, y + r * tall + 0.02, 0.03, tall - 0.04, style.rank_color(r), "none")
            for c, value in enumerate(held[r][step]):
                place = (x + c * wide, y + r * tall, wide, tall)
                box(ax, *place, _fill(value, n), PAPER, str(value), size, linewidth=1)
                if changed[step][r][c]:
                    sender = (r - 1) % n
                    _outline(ax, *place, style.rank_color(sender))
                    middle, edge = x + (c + 0.5) * wide, y + r * tall
                    ends = (middle, edge - 0.06), (middle, edge + 0.065)
                    style.arrow(ax, *ends, style.edge_color(sender), 1.6, mutation_scale=7)
    if n > 1:
        _key(ax, 0.02, top + head + bands * panel, n)
    return picture


def ring_step(result: Iterable[Any], step: int) -> Picture:
    """Draw what every rank holds after one step of a chunked ring all-reduce.

    result: of a run whose ranks return what `ring` takes, and whose trace has the messages of the
        ring and no others: each rank's message number `step` belongs to that step.
    step: 0 is before the first one.

    An arrow is a message of the trace, in the colour of the rank that sent it; it ends at the
    chunk that changed. Raises PlotError as `ring` does, and without a trace, for a step that the
    ring does not have, or for more than 8 ranks.
    """
    held = _read(result, MOST_IN_STEP)
    n, names = len(held), _step_names(len(held))
    if not 0 <= step < len(names):
        raise PlotError(f"step must be from 0 to {len(names) - 1}, got {step}")
    trace = read_trace(result)
    changed = _changed(held, step)
    received = {}  # by receiver
    for src in range(n) if step else ():
        message = trace.messages(src=src)[step - 1]
        received[message.dst] = message
    title = f"Ring all-reduce on {count(n, 'rank')}, "
    title += f"step {step} of {len(names) - 1}: {names[step]}" if step else "before the first step"
    rows = [
        [
            f"rank {r}",
            _chunks(held[r][step], changed[r]),
            f"{received[r].nbytes} B from rank {received[r].src}" if r in received else "-",
        ]
        for r in range(n)
    ]
    text_table = table(title, ["", "chunks", "received"], rows, align="<")

    left, top, tall, gap = 0.8, 0.75, 0.34, 0.3  # inches; the gap is an arrow's length
    wide = 0.09 * n + 0.3
    caption = "Columns are chunks. A number's digits name the ranks in it."
    caption += " An arrow is a message of the trace." if n > 1 else ""
    below = top + n * (tall + gap) + 0.1
    picture, ax = open_picture(title, text_table, left + n * wide + 1.6, below, caption)
    for c in range(n):
        at = left + c * wide + 0.09, top - 0.1  # beside the arrow of a chunk
        write(ax, *at, str(c), 7.5, color=QUIET, ha="center")
    for r in range(n):
        y = top + r * (tall + gap)
        style.chip(ax, 0, y + tall / 2, 0.6, r, f"rank {r}")
        src = received[r].src if r in received else None
        for c, value in enumerate(held[r][step]):
            x = left + c * wide
            box(ax, x, y, wide, tall, _fill(value, n), PAPER, str(value), linewidth=1)
            if changed[r][c] and src is not None:
                _outline(ax, x, y, wide, tall, style.rank_color(src))
                middle = x + wide / 2
                ends = (middle, y - gap + 0.02), (middle, y)
                style.arrow(ax, *ends, style.edge_color(src), 1.6, mutation_scale=9)
                if src > r:  # it leaves the last row, and enters above the first
                    end = top + src * (tall + gap) + tall
                    look = {"color": style.edge_color(src), "linewidth": 1.6, "linestyle": ":"}
                    ax.plot([middle] * 2, [end, end + gap - 0.08], **look)
        if src is not None:
            text = f"{style.byte_size(received[r].nbytes)} from rank {src}"
            write(ax, left + n * wide + 0.15, y + tall / 2, text, 8.5, color=QUIET)
    return picture


def _read(result: Iterable[Any], most: int) -> Held:
    values = read_ranks(result)
    n = len(values)
    if n > most:
        raise PlotError(f"a ring can be drawn for at most {most} ranks, got {n}")
    expected = (2 * (n - 1) + 1, n)
    for rank, value in enumerate(values):
        shape = tuple(getattr(value, "shape", ()))
        if shape != expected:
            got = f"shape {shape}" if hasattr(value, "shape") else repr(value)
            needed = f"a tensor of shape {expected} on {count(n, 'rank')}"
            raise PlotError(f"rank {rank} must return {needed}, got {got}")
    held = [value.tolist() for value in values]
    return [[[int(cell) for cell in step] for step in steps] for steps in held]


def _step_names(n: int) -> list[str]:
    """Return "start", and the name of each of the 2 * (n - 1) steps of a ring of n ranks."""
    return ["start", *(f"{p} {i}" for p in ("reduce-scatter", "all-gather") for i in range(1, n))]


def _changed(held: Held, step: int) -> list[list[bool]]:
    return [
        [step > 0 and now != before for now, before in zip(rank[step], rank[step - 1], strict=True)]
        for rank in held
    ]


def _chunks(values: list[int], changed: list[bool]) -> str:
    return " ".join(f"{v}{'*' * c}" for v, c in zip(values, changed, strict=True))


def _complete(n: int) -> int:
    return (10**n - 1) // 9


def _measure(n: int) -> tuple[float, float, float, int]:
    """Return a cell's width and height in inches, its font size in points, and panels per row."""
    if n <= 4:
        return max(0.3, 0.1 * n + 0.02), 0.27, 9, n
    return {5: (0.425, 0.25, 8.2, 3), 6: (0.45, 0.25, 7.3, 3)}[n]


def _fill(value: int, n: int) -> str:
    """Return the colour of a cell: darker the more ranks are in it."""
    have = str(value).count("1")
    if value == _complete(n):
        return COMPLETE
    if have == 0:
        return PAPER
    return style.blend(FEW, MANY, (have - 1) / max(1, n - 2))


def _outline(ax: Axes, x: float, y: float, wide: float, tall: float, color: str) -> None:
    inset = 0.022
    edge = {"linewidth": 1.8, "joinstyle": "miter"}
    box(ax, x + inset, y + inset, wide - 2 * inset, tall - 2 * inset, "none", color, **edge)


def _key(ax: Axes, x: float, y: float, n: int) -> None:
    """Draw what shade and outline mean, in the place of the missing panel."""
    counts = sorted({1, min(2, n - 1), n - 1})
    names = {many: f"{'… ' * (many > 3)}{count(many, 'rank')}" for many in counts}
    looks = {names[many]: (_fill(int("1" * many), n), "none") for many in counts}
    looks |= {"complete": (COMPLETE, "none"), "from rank 0": ("none", "none")}
    style.draw_key(ax, x, y, looks, columns=1)
    _outline(ax, x, y + (len(looks) - 1) * style.KEY_ROW, 0.26, 0.16, style.rank_color(0))


def _caption(n: int) -> str:
    digits = {1: "1", 2: "11", 3: "101"}.get(n, "1011")
    summed = name_ranks(i for i, digit in enumerate(reversed(digits)) if digit == "1")
    text = (
        f"Rows: ranks; columns: chunks; a number's digits name the ranks in it ({digits}: {summed})"
    )
    if n > 1:
        text += "; an outline in the left neighbour's colour marks a cell just received from it"
        text += ". Follow a column: its arrow moves down by one rank from panel to panel"
    return text + "."
