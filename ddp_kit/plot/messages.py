"""Who sent how many bytes to whom: a matrix."""

from __future__ import annotations

from collections import Counter
from numbers import Real
from typing import Any

from ddp_kit.error_text import count
from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import (
    LARGEST,
    Picture,
    borders_caption,
    host_borders,
    open_picture,
    read_trace,
    room_for,
    table,
)
from ddp_kit.plot.style import INK, NOTHING, PAPER, QUIET, blend, box, byte_size, chip, fold, write
from ddp_kit.trace import Trace

FEW, MANY, SUM = "#e8edf2", "#33475b", "#f4f4f4"  # no rank has one of these
LEFT, TOP, CHIP, GAP = 0.95, 0.82, 0.6, 0.1  # inches


def messages(
    source: Any,
    title: str | None = None,
    limit: int | None = None,
    per_host: int | None = None,
) -> Picture:
    """Draw how many bytes each rank sent to each other one, point to point.

    source: a trace, or a result or an error, whose `trace` is taken. Rows are senders and
    columns receivers, with the sums of both; more bytes make a darker cell. What collectives
    move is not included, and the caption says so.
    limit: the bytes that the darkest shade stands for, by default the most of any pair. Pictures
        with the same limit can be compared.
    per_host: the ranks of each host, if there are several: heavy lines then separate the hosts,
        and the caption says how much went from host to host.

    Raises PlotError if there is no trace, no message was sent, `limit` is not a finite number or
    less than the bytes of a pair, or `per_host` is not a positive whole number.
    """
    trace = read_trace(source)
    found = trace.messages()
    if not found:
        raise PlotError("no rank sent a message point to point: there is nothing to draw")
    n = trace.world_size
    sent: Counter[tuple[int, int]] = Counter()
    for message in found:
        sent[message.src, message.dst] += message.nbytes
    if title is None:
        title = f"Who sent how many bytes to whom, in {count(len(found), 'message')}"
    most = max(sent.values())
    if limit is not None and not (isinstance(limit, Real) and most <= limit < LARGEST):
        raise PlotError(
            f"limit must be a finite number of at least {most:,}, the most bytes of a pair, "
            f"got {limit!r}"
        )
    matrix = [[sent.get((src, dst)) for dst in range(n)] for src in range(n)]
    gave = [sum(filter(None, row)) for row in matrix]
    took = [sum(filter(None, column)) for column in zip(*matrix, strict=True)]
    borders = host_borders(n, per_host)
    caption = _caption(trace, limit)
    if borders:
        crossing = sum(b for (src, dst), b in sent.items() if src // per_host != dst // per_host)
        caption += (
            f" {borders_caption(n, borders[0])}; {crossing:,} of {sum(gave):,} bytes went from "
            "host to host."
        )
    ranks = [f"rank {rank}" for rank in range(n)]
    numbers = [
        [*row, total] for row, total in zip([*matrix, took], [*gave, sum(gave)], strict=True)
    ]
    rows = [
        [name, *(NOTHING if nbytes is None else f"{nbytes:,}" for nbytes in row)]
        for name, row in zip([*ranks, "all"], numbers, strict=True)
    ]
    text_table = table(title, ["from \\ to", *ranks, "all"], rows) + f"\n{caption}"

    wide = max(0.45, min(0.85, 7.4 / (n + 1)))
    tall, size = min(0.42, 0.8 * wide), 9 if wide > 0.62 else 7.2
    width = max(LEFT + (n + 1) * wide + GAP, room_for(title)) + 0.04  # for the last edge
    below = TOP + (n + 1) * tall + GAP + 0.12
    lines = fold(caption, width)
    picture, ax = open_picture(title, text_table, width, below, lines, lift=0.1)
    write(ax, LEFT, TOP - 0.42, "to", 9, color=QUIET)
    write(ax, 0.02, TOP - 0.13, "from", 9, color=QUIET)
    darkest = limit or most or 1
    xs = [LEFT + i * wide + (GAP if i == n else 0) for i in range(n + 1)]
    ys = [TOP + i * tall + (GAP if i == n else 0) for i in range(n + 1)]
    narrow = min(CHIP, wide - 0.12)
    for r, name in enumerate(ranks):
        chip(ax, 0.16, ys[r] + tall / 2 - 0.1, CHIP, 0.2, r, name)
        short = name if wide > 0.62 else str(r)
        chip(ax, xs[r] + (wide - narrow) / 2, TOP - 0.28, narrow, 0.2, r, short)
    for i, y in enumerate(ys):
        for j, x in enumerate(xs):
            nbytes, edge = numbers[i][j], {"edge": "#d4d4d4", "linewidth": 0.6}
            if nbytes is None:
                box(ax, x, y, wide, tall, PAPER, **edge)
                style = {"color": "#a6a6a6", "ha": "center"}
                write(ax, x + wide / 2, y + tall / 2, NOTHING, size, **style)
            else:
                fill = SUM if n in (i, j) else blend(FEW, MANY, nbytes / darkest)
                box(ax, x, y, wide, tall, fill, text=byte_size(nbytes), size=size, **edge)
    for border in borders:
        line = {"color": INK, "linewidth": 2.2, "linestyle": "-", "solid_capstyle": "butt"}
        ax.plot([xs[border]] * 2, [TOP - 0.3, ys[n - 1] + tall], **line)
        ax.plot([0.16, xs[n - 1] + wide], [ys[border]] * 2, **line)
    write(ax, xs[n] + wide / 2, TOP - 0.18, "all", 9, color=QUIET, ha="center")
    write(ax, 0.16 + CHIP / 2, ys[n] + tall / 2, "all", 9, color=QUIET, ha="center")
    return picture


def _caption(trace: Trace, limit: int | None) -> str:
    lost, collectives, dropped = len(trace.lost), len(trace.collectives), sum(trace.dropped)
    were, are = "was" if lost == 1 else "were", "is" if collectives == 1 else "are"
    parts = {
        "Rows: senders; columns: receivers; bytes of the tensors that were sent.": True,
        f"The darkest shade stands for {byte_size(limit or 0)}.": limit is not None,
        f"{count(lost, 'message')} {were} never received.": lost,
        f"{count(collectives, 'collective')} {are} not included.": collectives,
        f"The {dropped:,} oldest events were dropped and are not shown.": dropped,
    }
    return " ".join(part for part, applies in parts.items() if applies)
