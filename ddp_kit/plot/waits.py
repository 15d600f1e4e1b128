"""Who waits for whom in a run that cannot end: ranks on a circle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Circle

from ddp_kit.failures import Wait, name_ranks
from ddp_kit.plot.marks import DASHES, LOST, point
from ddp_kit.plot.numbers import table
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.style import INK, PAPER, QUIET, fold, rank_color, text_color, write
from ddp_kit.verdict import shortest_cycle

NODE, SIDE = 0.2, 1.75  # inches: a rank's radius; room for the words beside the circle
GONE, PALE = "#dcdcdc", "#9a9a9a"


def waits(error: Any, title: str | None = None) -> Picture:
    """Draw an arrow from each stuck rank to every rank that it waits for.

    error: a DeadlockError, or anything with `.waits`, a sequence of Wait with `peers`, and
        `.returned`, the ranks that had returned, which are drawn grey. Each stuck rank has its
        operation and line beside it.

    The shortest cycle is drawn thick. Dashed arrows leave a receive from any source: one of
    the ranks they point to would do.

    ValueError if no rank waits. TypeError if error has no waits.
    """
    if not hasattr(error, "waits"):
        raise TypeError(f"needs an error with .waits, got {error!r}")
    stuck = {wait.rank: wait for wait in sorted(error.waits, key=lambda wait: wait.rank)}
    if not stuck:
        raise ValueError("no rank waits: there is nothing to draw")
    returned = set(getattr(error, "returned", ()))
    peers = {rank: sorted(set(getattr(w, "peers", ())) - {rank}) for rank, w in stuck.items()}
    ranks = sorted(returned.union(stuck, *peers.values()))
    cycle = shortest_cycle(peers)
    if title is None:
        title = _title(cycle, peers, returned)
    said = _caption(cycle, stuck, peers, returned)
    rows = [
        [
            f"rank {rank}",
            stuck[rank].op or "no call" if rank in stuck else _state(rank, returned),
            ", ".join(map(str, peers.get(rank, ()))) or "\N{EN DASH}",
            _line(stuck.get(rank)),
        ]
        for rank in ranks
    ]
    twin = table(title, ["", "is in", "waits for", "line"], rows, align="<")
    if cycle:
        twin += "\ncycle: " + " → ".join(map(str, [*cycle, cycle[0]]))

    radius = max(0.85, 0.62 * len(ranks) / math.pi * 0.8)
    width = 2 * (radius + NODE + SIDE)
    lines = fold(said, width)
    middle = width / 2, 0.75 + radius + NODE if len(ranks) > 2 else 0.7
    places = _places(ranks, middle, radius)
    below = max(y for _, y in places.values()) + NODE + 0.42
    picture = Picture(width, below + 0.1 + 0.17 * len(lines), twin)
    ax = picture.sheet()
    write(ax, 0.02, 0.12, title, 11.5, weight="bold")
    why = set(zip(cycle, [*cycle[1:], *cycle[:1]], strict=True))
    if not cycle:
        why = {(rank, peer) for rank in peers for peer in peers[rank] if peer in returned}
    for rank, targets in peers.items():
        for peer in targets:
            _wait(ax, places, rank, peer, (rank, peer) in why, _any(stuck[rank]))
    for rank, place in places.items():
        fill = rank_color(rank) if rank not in returned else GONE
        edge = {"edgecolor": LOST if rank in cycle else "none", "linewidth": 2.2}
        ax.add_patch(Circle(place, NODE, facecolor=fill, zorder=5, **edge))
        style = {"color": text_color(fill), "ha": "center", "weight": "bold", "zorder": 6}
        write(ax, *place, str(rank), 9.5, **style)
        wait = stuck.get(rank)
        told = [_state(rank, returned)] if wait is None else [wait.op or "no call"]
        _beside(ax, place, middle, [*told, _line(wait, "line ")])
    for i, line in enumerate(lines):
        write(ax, 0.02, below + 0.1 + 0.17 * i, line, 8.5, color=QUIET)
    return picture


def _title(cycle: Sequence[int], peers: Mapping[int, Sequence[int]], returned: set[int]) -> str:
    if cycle:
        whom = "each other" if len(cycle) == 2 else "one another in a cycle"
        who = name_ranks(cycle).capitalize() if len(cycle) <= 6 else f"{len(cycle)} ranks"
        return f"{who} wait for {whom}"
    gone = returned.intersection(*[set().union(*peers.values())])
    if gone:
        left = [rank for rank in peers if returned & set(peers[rank])]
        who = name_ranks(left).capitalize() if len(left) <= 6 else f"{len(left)} ranks"
        wait = "waits" if len(left) == 1 else "wait"
        return f"{who} {wait} for {name_ranks(gone)}, which had returned"
    return "Who waits for whom"


def _caption(cycle, stuck, peers, returned) -> str:
    said = ["An arrow: this rank waits for that one."]
    if cycle:
        said.append("Thick: a cycle, in which each can go on only after the next one.")
    elif any(returned.intersection(targets) for targets in peers.values()):
        said.append("Thick: it waits for a rank that had returned.")
    if any(_any(stuck[rank]) and peers[rank] for rank in stuck):
        said.append("Dashed: any one of these would do.")
    if returned:
        said.append("Grey: had returned, and sends nothing more.")
    return " ".join(said)


def _any(wait: Wait) -> bool:
    """A receive without a src takes a message of any rank."""
    return (wait.op or "").startswith(("recv", "irecv")) and len(getattr(wait, "peers", ())) > 1


def _state(rank: int, returned: set[int]) -> str:
    return "returned" if rank in returned else "running"


def _line(wait: Wait | None, before: str = "") -> str:
    return f"{before}{wait.where.line}" if wait is not None and wait.where else ""


def _places(ranks: Sequence[int], middle, radius: float) -> dict[int, tuple[float, float]]:
    """Stand the ranks on a circle, clockwise from the top; two stand side by side."""
    first = -math.pi if len(ranks) == 2 else -math.pi / 2
    turns = [first + 2 * math.pi * i / len(ranks) for i in range(len(ranks))]
    return {
        rank: (middle[0] + radius * math.cos(turn), middle[1] + radius * math.sin(turn))
        for rank, turn in zip(ranks, turns, strict=True)
    }


def _wait(ax: Axes, places, rank: int, peer: int, thick: bool, one_of: bool) -> None:
    """Draw an arrow that bends, so that one in each direction are two."""
    color = LOST if thick else PALE
    style = {"connectionstyle": "arc3,rad=0.16", "linestyle": DASHES if one_of else "-"}
    inches = 72 * (NODE + 0.035)
    shrink = {"shrinkA": inches, "shrinkB": inches, "zorder": 4 if thick else 3}
    point(ax, places[rank], places[peer], color, 2.6 if thick else 1, **style, **shrink)


def _beside(ax: Axes, place, middle, told: Sequence[str]) -> None:
    """Write words beside a rank, away from the middle."""
    far = math.dist(place, middle) or 1
    x, y = (place[0] - middle[0]) / far, (place[1] - middle[1]) / far
    ha = "center" if abs(x) < 0.25 else "left" if x > 0 else "right"
    said = [text for text in told if text]
    at_x = place[0] + (NODE + 0.08) * x
    at_y = place[1] + (NODE + 0.08 + 0.0775 * len(said)) * y
    for i, text in enumerate(said):
        line = at_y + 0.155 * (i - (len(said) - 1) / 2)
        paper = {"boxstyle": "square,pad=0.05", "facecolor": PAPER, "edgecolor": "none"}
        style = {"ha": ha, "color": INK if i == 0 else QUIET, "bbox": paper, "zorder": 4.5}
        write(ax, at_x, line, text, 8.5, **style)
