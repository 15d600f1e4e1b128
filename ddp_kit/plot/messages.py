"""Who sent how many bytes to whom: a matrix."""

from __future__ import annotations

from collections import Counter
from typing import Any

from matplotlib.colors import to_hex, to_rgb

from ddp_kit.plot.numbers import size, table
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.source import read_trace
from ddp_kit.plot.style import PAPER, QUIET, box, chip, fold, text_color, write

FEW, MANY, SUM = "#e8edf2", "#33475b", "#f4f4f4"  # no rank wears one of these
LEFT, TOP, CHIP, GAP = 0.95, 0.82, 0.6, 0.1  # inches


def messages(source: Any, title: str | None = None) -> Picture:
    """Draw how many bytes each rank sent to each other one, point to point.

    source: a trace, or a result or an error, whose `trace` is taken. Rows are senders and
    columns receivers, with the sums of both; a cell darkens with its bytes. What collectives
    move is not in it, and the caption says so.

    ValueError if no message was sent. TypeError without a trace.
    """
    trace = read_trace(source)
    found = trace.messages()
    if not found:
        raise ValueError("no rank sent a message point to point: there is nothing to draw")
    n, number = trace.world_size, len(found)
    sent: Counter[tuple[int, int]] = Counter()
    for message in found:
        sent[message.src, message.dst] += message.nbytes
    if title is None:
        noun = "message" if number == 1 else "messages"
        title = f"Who sent how many bytes to whom, in {number:,} {noun}"
    rows_of = [[sent.get((src, dst)) for dst in range(n)] for src in range(n)]
    sums = [sum(filter(None, row)) for row in rows_of]
    taken = [sum(filter(None, column)) for column in zip(*rows_of, strict=True)]
    said = _caption(trace)
    twin = table(
        title,
        ["from \\ to", *(f"rank {rank}" for rank in range(n)), "all"],
        [
            *([f"rank {r}", *map(_exact, row), _exact(sums[r])] for r, row in enumerate(rows_of)),
            ["all", *map(_exact, taken), _exact(sum(sums))],
        ],
    )

    wide = max(0.45, min(0.85, 7.4 / (n + 1)))
    tall, type_ = min(0.42, 0.8 * wide), 9 if wide > 0.62 else 7.2
    width = max(LEFT + (n + 1) * wide + GAP, 5.8)
    lines = fold(said, width)
    below = TOP + (n + 1) * tall + GAP + 0.12
    picture = Picture(width, below + 0.17 * len(lines), f"{twin}\n{said}")
    ax = picture.sheet()
    write(ax, 0.02, 0.12, title, 11.5, weight="bold")
    write(ax, LEFT, TOP - 0.42, "to", 9, color=QUIET)
    write(ax, 0.02, TOP - 0.13, "from", 9, color=QUIET)
    most = max(sent.values()) or 1
    for r in range(n):
        y, x = TOP + r * tall, LEFT + r * wide
        chip(ax, 0.16, y + tall / 2 - 0.1, CHIP, 0.2, r, f"rank {r}")
        named = f"rank {r}" if wide > 0.62 else str(r)
        narrow = min(CHIP, wide - 0.12)
        chip(ax, x + (wide - narrow) / 2, TOP - 0.28, narrow, 0.2, r, named)
        for dst, nbytes in enumerate(rows_of[r]):
            fill = PAPER if nbytes is None else _shade(nbytes / most)
            _cell(ax, LEFT + dst * wide, y, wide, tall, fill, nbytes, type_)
        _cell(ax, LEFT + n * wide + GAP, y, wide, tall, SUM, sums[r], type_)
        _cell(ax, x, TOP + n * tall + GAP, wide, tall, SUM, taken[r], type_)
    corner = LEFT + n * wide + GAP, TOP + n * tall + GAP
    _cell(ax, *corner, wide, tall, SUM, sum(sums), type_)
    write(ax, corner[0] + wide / 2, TOP - 0.18, "all", 9, color=QUIET, ha="center")
    write(ax, 0.16 + CHIP / 2, corner[1] + tall / 2, "all", 9, color=QUIET, ha="center")
    for i, line in enumerate(lines):
        write(ax, 0.02, below + 0.1 + 0.17 * i, line, 8.5, color=QUIET)
    return picture


def _exact(nbytes: int | None) -> str:
    return "\N{EN DASH}" if nbytes is None else f"{nbytes:,}"


def _cell(ax, x, y, wide, tall, fill, nbytes, type_) -> None:
    box(ax, x, y, wide, tall, fill, "#d4d4d4", linewidth=0.6)
    text = "\N{EN DASH}" if nbytes is None else size(nbytes)
    color = "#a6a6a6" if nbytes is None else text_color(fill)
    write(ax, x + wide / 2, y + tall / 2, text, type_, color=color, ha="center")


def _shade(share: float) -> str:
    pairs = zip(to_rgb(FEW), to_rgb(MANY), strict=True)
    return to_hex([few + (many - few) * share for few, many in pairs])


def _caption(trace) -> str:
    said = ["Rows: senders; columns: receivers; bytes of the tensors that were sent."]
    lost = len(trace.lost)
    if lost:
        was = "message was" if lost == 1 else "messages were"
        said.append(f"{lost:,} {was} never received.")
    collectives = len(trace.collectives)
    if collectives:
        noun = "collective is" if collectives == 1 else "collectives are"
        said.append(f"{collectives:,} {noun} not in it.")
    if any(trace.dropped):
        said.append(f"The {sum(trace.dropped):,} oldest events were not kept and are not here.")
    return " ".join(said)
