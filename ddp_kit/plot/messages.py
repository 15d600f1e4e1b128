"""What is between two ranks: how many bytes one sent to the other, and who waits for whom."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Circle

from ddp_kit.error_text import Wait, count, name_ranks
from ddp_kit.errors import PlotError
from ddp_kit.plot import picture as pictures
from ddp_kit.plot import style
from ddp_kit.plot.picture import Picture, open_picture, table
from ddp_kit.plot.style import DASHES, INK, LOST, NOTHING, PAPER, QUIET, box, write
from ddp_kit.trace import Trace
from ddp_kit.verdict import shortest_cycle

FEW, MANY, SUM = "#e8edf2", "#33475b", "#f4f4f4"  # no rank has one of these
LEFT, TOP, CHIP, GAP = 0.95, 0.82, 0.6, 0.1  # inches of the matrix
NODE, SIDE = 0.2, 1.75  # inches: a rank's radius; room for the text beside the circle
GONE, PALE = "#dcdcdc", "#9a9a9a"


def messages(source: Any, title: str | None = None, per_host: int | None = None) -> Picture:
    """Draw how many bytes each rank sent to each other one, point to point.

    source: a trace, or a result or an error, whose `trace` is taken. Rows are senders and
    columns receivers, with the sums of both; more bytes make a darker cell. What collectives
    move is not included, and the caption says so.
    per_host: the ranks of each host, if there are several: heavy lines then separate the hosts,
        and the caption says how much went from host to host.

    Raises PlotError if there is no trace, no message was sent, or `per_host` is not a positive
    whole number.
    """
    trace = pictures.read_trace(source)
    found = trace.messages()
    if not found:
        raise PlotError("no rank sent a message point to point: there is nothing to draw")
    n = trace.world_size
    sent: Counter[tuple[int, int]] = Counter()
    for message in found:
        sent[message.src, message.dst] += message.nbytes
    if title is None:
        title = f"Who sent how many bytes to whom, in {count(len(found), 'message')}"
    if per_host is not None and (not isinstance(per_host, int) or per_host < 1):
        raise PlotError(f"per_host must be at least 1, the ranks of each host, got {per_host!r}")
    matrix = [[sent.get((src, dst)) for dst in range(n)] for src in range(n)]
    gave = [sum(filter(None, row)) for row in matrix]
    took = [sum(filter(None, column)) for column in zip(*matrix, strict=True)]
    caption = _matrix_caption(trace)
    if per_host is not None and per_host < n:
        crossing = sum(b for (src, dst), b in sent.items() if src // per_host != dst // per_host)
        own = count(per_host, "rank")
        hosts = f"of at most {own}" if n % per_host else f"of {own} each"
        caption += f" Heavy lines separate hosts {hosts}; {crossing:,} of {sum(gave):,}"
        caption += " bytes went from host to host."
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
    width = LEFT + (n + 1) * wide + GAP + 0.04  # for the last edge
    below = TOP + (n + 1) * tall + GAP + 0.1
    picture, ax = open_picture(title, text_table, width, below, caption)
    write(ax, LEFT, TOP - 0.42, "to", 9, color=QUIET)
    write(ax, 0, TOP - 0.13, "from", 9, color=QUIET)
    darkest = max(sent.values()) or 1
    xs = [LEFT + i * wide + (GAP if i == n else 0) for i in range(n + 1)]
    ys = [TOP + i * tall + (GAP if i == n else 0) for i in range(n + 1)]
    narrow = min(CHIP, wide - 0.12)
    for r, name in enumerate(ranks):
        style.chip(ax, 0.16, ys[r] + tall / 2, CHIP, r, name)
        short = name if wide > 0.62 else str(r)
        style.chip(ax, xs[r] + (wide - narrow) / 2, TOP - 0.18, narrow, r, short)
    for i, y in enumerate(ys):
        for j, x in enumerate(xs):
            nbytes, edge = numbers[i][j], {"edge": "#d4d4d4", "linewidth": 0.6}
            if nbytes is None:
                box(ax, x, y, wide, tall, PAPER, **edge)
                look = {"color": "#a6a6a6", "ha": "center"}
                write(ax, x + wide / 2, y + tall / 2, NOTHING, size, **look)
            else:
                fill = SUM if n in (i, j) else style.blend(FEW, MANY, nbytes / darkest)
                box(ax, x, y, wide, tall, fill, text=style.byte_size(nbytes), size=size, **edge)
    for border in range(per_host or n, n, per_host or n):
        line = {"color": INK, "linewidth": 2.2, "linestyle": "-", "solid_capstyle": "butt"}
        ax.plot([xs[border]] * 2, [TOP - 0.3, ys[n - 1] + tall], **line)
        ax.plot([0.16, xs[n - 1] + wide], [ys[border]] * 2, **line)
    write(ax, xs[n] + wide / 2, TOP - 0.18, "all", 9, color=QUIET, ha="center")
    write(ax, 0.16 + CHIP / 2, ys[n] + tall / 2, "all", 9, color=QUIET, ha="center")
    return picture


def _matrix_caption(trace: Trace) -> str:
    lost, collectives, dropped = len(trace.lost), len(trace.collectives), sum(trace.dropped)
    were, are = "was" if lost == 1 else "were", "is" if collectives == 1 else "are"
    parts = {
        "Rows: senders; columns: receivers; bytes of the tensors that were sent.": True,
        f"{count(lost, 'message')} {were} never received.": lost,
        f"{count(collectives, 'collective')} {are} not included.": collectives,
        f"The {dropped:,} oldest events were dropped and are not shown.": dropped,
    }
    return " ".join(part for part, applies in parts.items() if applies)


def waits(error: Any, title: str | None = None) -> Picture:
    """Draw an arrow from each stuck rank to every rank that it waits for.

    error: a DeadlockError, or anything with `.waits`, a sequence of Wait with `peers`, and
        `.returned`, the ranks that had returned, which are drawn grey. Each stuck rank has its
        operation and line beside it.

    The shortest cycle is drawn thick. Dashed arrows leave a receive from any source: one of
    the ranks they point to would do.

    Raises PlotError if error has no waits, or no rank waits.
    """
    if not hasattr(error, "waits"):
        raise PlotError(f"needs an error with .waits, got {error!r}")
    if not error.waits:
        raise PlotError("no rank waits: there is nothing to draw")
    stuck = {wait.rank: wait for wait in sorted(error.waits, key=lambda wait: wait.rank)}
    returned = set(getattr(error, "returned", ()))
    peers = {rank: sorted(set(getattr(w, "peers", ())) - {rank}) for rank, w in stuck.items()}
    ranks = sorted(returned.union(stuck, *peers.values()))
    cycle = shortest_cycle(peers)
    title = _title(cycle, peers, returned) if title is None else title
    states = {rank: "returned" if rank in returned else "running" for rank in ranks}
    states |= {rank: wait.op or "no call" for rank, wait in stuck.items()}
    line_of = {rank: str(wait.where.line) for rank, wait in stuck.items() if wait.where}
    rows = [
        [
            f"rank {rank}",
            states[rank],
            ", ".join(map(str, peers.get(rank, ()))) or NOTHING,
            line_of.get(rank, ""),
        ]
        for rank in ranks
    ]
    text_table = table(title, ["", "is in", "waits for", "line"], rows, align="<")
    if cycle:
        text_table += "\ncycle: " + " → ".join(map(str, [*cycle, cycle[0]]))

    radius = max(0.85, 0.62 * len(ranks) / math.pi * 0.8)
    width = 2 * (radius + NODE + SIDE)
    middle = width / 2, 0.75 + radius + NODE if len(ranks) > 2 else 0.7
    places = _places(ranks, middle, radius)
    below = max(y for _, y in places.values()) + NODE + 0.52
    caption = _waits_caption(cycle, stuck, peers, returned)
    picture, ax = open_picture(title, text_table, width, below, caption)
    why = set(zip(cycle, [*cycle[1:], *cycle[:1]], strict=True))
    if not cycle:
        why = {(rank, peer) for rank in peers for peer in peers[rank] if peer in returned}
    rim = 72 * (NODE + 0.035)  # points
    bend = {"connectionstyle": "arc3,rad=0.16", "shrinkA": rim, "shrinkB": rim}
    for rank, targets in peers.items():
        for peer in targets:
            # Curved, so that one in each direction do not cover each other.
            look = {"linestyle": DASHES if _any(stuck[rank]) else "-", **bend}
            thick = (rank, peer) in why
            color, width, zorder = (LOST, 2.6, 4) if thick else (PALE, 1, 3)
            style.arrow(ax, places[rank], places[peer], color, width, zorder=zorder, **look)
    for rank, place in places.items():
        fill = style.rank_color(rank) if rank not in returned else GONE
        edge = {"edgecolor": LOST if rank in cycle else "none", "linewidth": 2.2}
        ax.add_patch(Circle(place, NODE, facecolor=fill, zorder=5, **edge))
        look = {"color": style.text_color(fill), "ha": "center", "weight": "bold", "zorder": 6}
        write(ax, *place, str(rank), 9.5, **look)
        line = [f"line {line_of[rank]}"] if rank in line_of else []
        _beside(ax, place, middle, [states[rank], *line])
    return picture


def _title(cycle: Sequence[int], peers: Mapping[int, Sequence[int]], returned: set[int]) -> str:
    if cycle:
        whom = "each other" if len(cycle) == 2 else "one another in a cycle"
        return f"{_who(cycle)} wait for {whom}"
    gone = returned.intersection(*[set().union(*peers.values())])
    if gone:
        left = [rank for rank in peers if returned & set(peers[rank])]
        wait = "waits" if len(left) == 1 else "wait"
        return f"{_who(left)} {wait} for {name_ranks(gone)}, which had returned"
    return "Who waits for whom"


def _who(ranks: Sequence[int]) -> str:
    return name_ranks(ranks).capitalize() if len(ranks) <= 6 else f"{len(ranks)} ranks"


def _waits_caption(cycle, stuck, peers, returned) -> str:
    gone = any(returned.intersection(targets) for targets in peers.values())
    parts = {
        "An arrow: this rank waits for that one.": True,
        "Thick: a cycle, in which each can go on only after the next one.": cycle,
        "Thick: it waits for a rank that had returned.": gone and not cycle,
        "Dashed: any one of these would do.": any(_any(stuck[r]) and peers[r] for r in stuck),
        "Grey: had returned, and sends nothing more.": returned,
    }
    return " ".join(part for part, applies in parts.items() if applies)


def _any(wait: Wait) -> bool:
    """Return whether one rank is enough: for a receive without a src, or for a key of a store."""
    return (wait.op or "").startswith(("recv", "irecv", "store.")) and len(
        getattr(wait, "peers", ())
    ) > 1


def _places(ranks: Sequence[int], middle, radius: float) -> dict[int, tuple[float, float]]:
    """Return points on a circle, clockwise from the top; two ranks are side by side."""
    first = -math.pi if len(ranks) == 2 else -math.pi / 2
    turns = [first + 2 * math.pi * i / len(ranks) for i in range(len(ranks))]
    return {
        rank: (middle[0] + radius * math.cos(turn), middle[1] + radius * math.sin(turn))
        for rank, turn in zip(ranks, turns, strict=True)
    }


def _beside(ax: Axes, place, middle, lines: Sequence[str]) -> None:
    far = math.dist(place, middle) or 1
    x, y = (place[0] - middle[0]) / far, (place[1] - middle[1]) / far
    ha = "center" if abs(x) < 0.25 else "left" if x > 0 else "right"
    at_x = place[0] + (NODE + 0.08) * x
    at_y = place[1] + (NODE + 0.08 + 0.0775 * len(lines)) * y
    for i, text in enumerate(lines):
        line = at_y + 0.155 * (i - (len(lines) - 1) / 2)
        paper = {"boxstyle": "square,pad=0.05", "facecolor": PAPER, "edgecolor": "none"}
        look = {"ha": ha, "color": INK if i == 0 else QUIET, "bbox": paper, "zorder": 4.5}
        write(ax, at_x, line, text, 8.5, **look)
