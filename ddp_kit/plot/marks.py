"""The marks of a timeline, one by one: bars, links and arrows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from ddp_kit.plot.lanes import Arrow, Bar, Lanes, Link
from ddp_kit.plot.style import INK, PAPER, edge_color, write

HALF = 0.27  # of a lane: a bar reaches so far from the middle
TYPE, CHARACTER = 7.5, 0.0655  # points; inches of one character
MOST_NAMED = 12  # ends without another end; above, the dashes alone tell them
COMPUTING, DASHES = "#e3e8ee", (0, (3, 2))
LOST = "#882255"
# kind: fill, edge, hatch. None wears a rank's colour; in grey they still differ.
LOOKS = {
    "send": ("#454545", "#222222", None),
    "recv": ("#dfdaf8", "#6a5acd", "/////"),
    "collective": ("#b9e0da", "#2b7f73", "....."),
}


def band(ax: Axes, kind: str, ranges: Sequence[tuple[float, float]], low: float, high: float):
    """Draw bars of one kind, (begin, length) each, between two heights."""
    fill, edge, hatch = LOOKS[kind]
    drawn = ax.broken_barh(
        ranges, (low, high - low), facecolor=fill, edgecolor=edge, linewidth=0.7, linestyle="-"
    )
    dress(drawn, hatch, edge)
    return drawn


def dress(drawn, hatch: str | None, color: str) -> None:
    """Hatch a shape with lines of our own colour and width."""
    if hatch:
        drawn.set_hatch(hatch)
        for name, value in (("set_hatchcolor", color), ("set_hatch_linewidth", 0.7)):
            if hasattr(drawn, name):  # before matplotlib 3.11 and 3.10 rcParams alone say it
                getattr(drawn, name)(value)


def lanes_of(ax: Axes, lanes: Lanes) -> None:
    """Draw the pale bar on which each rank's operations stand."""
    for rank, (begin, end) in enumerate(lanes.spans):
        place = (rank - HALF, 2 * HALF)
        ax.broken_barh([(begin, end - begin)], place, facecolor=COMPUTING, edgecolor="none")


def draw(ax: Axes, lanes: Lanes, scale: float) -> None:
    """Draw every bar, link and arrow; scale: inches of one unit of the axis."""
    lanes_of(ax, lanes)
    groups: dict[tuple, list[Bar]] = {}
    for bar in lanes.bars:
        groups.setdefault((bar.rank, bar.kind, bool(bar.never)), []).append(bar)
    for (rank, kind, never), bars in groups.items():
        ranges = [(bar.begin, bar.end - bar.begin) for bar in bars]
        drawn = band(ax, kind, ranges, rank - HALF, rank + HALF)
        drawn.set_zorder(2)
        if never:
            drawn.set(linestyle=DASHES, edgecolor=LOST, linewidth=1.3)
    for link in lanes.links:
        _link(ax, link)
    for bar in lanes.bars:
        _label(ax, bar, scale)
    told = {(bar.rank, bar.never) for bar in lanes.bars if _says_never(bar, scale)}
    lost = [arrow for arrow in lanes.arrows if arrow.never]
    for arrow in lanes.arrows:
        if arrow.never:
            rank = arrow.src if arrow.end is None else arrow.dst
            _stub(ax, arrow, scale, len(lost) <= MOST_NAMED and (rank, arrow.never) not in told)
        else:
            _arrow(ax, arrow)


def _label(ax: Axes, bar: Bar, scale: float) -> None:
    if bar.kind == "collective":
        return  # its name stands above
    said = f"{bar.op}: {bar.never}" if _says_never(bar, scale) else bar.op
    if not _fits(said, bar, scale):
        return
    paper = {"boxstyle": "square,pad=0.12", "facecolor": LOOKS[bar.kind][0], "edgecolor": "none"}
    color = PAPER if bar.kind == "send" else INK
    style = {"color": color, "ha": "center", "bbox": paper, "zorder": 3}
    write(ax, (bar.begin + bar.end) / 2, bar.rank, said, TYPE, **style)


def _fits(text: str, bar: Bar, scale: float) -> bool:
    return (bar.end - bar.begin) * scale >= CHARACTER * len(text) + 0.06


def _says_never(bar: Bar, scale: float) -> bool:
    return bool(bar.never) and _fits(f"{bar.op}: {bar.never}", bar, scale)


def _link(ax: Axes, link: Link) -> None:
    color = LOOKS["collective"][1] if link.whole else LOST
    places, ranks = zip(*sorted(link.points, key=lambda point: point[1]), strict=True)
    ax.plot(
        places,
        ranks,
        color=color,
        linewidth=1.6,
        linestyle="-" if link.whole else DASHES,
        marker="o",
        markersize=4.5,
        markerfacecolor=PAPER,
        markeredgecolor=color,
        markeredgewidth=1.2,
        zorder=3.5,
    )


def _arrow(ax: Axes, arrow: Arrow) -> None:
    side = math.copysign(HALF, arrow.dst - arrow.src)
    ends = (arrow.begin, arrow.src + side), (arrow.end, arrow.dst - side)
    point(ax, *ends, edge_color(arrow.src))


def _stub(ax: Axes, arrow: Arrow, scale: float, named: bool) -> None:
    """Draw the end of an arrow that has no other end, and say what did not come about."""
    sent = arrow.end is None
    src = arrow.src if arrow.src is not None else -1
    side = math.copysign(1, arrow.dst - src) * (1 if sent else -1)
    rank, at = (src, arrow.begin) if sent else (arrow.dst, arrow.end)
    near = (at, rank + HALF * side)
    far = (at + 0.14 / scale * (1 if sent else -1), rank + 0.46 * side)
    point(ax, *((near, far) if sent else (far, near)), LOST, linestyle=DASHES)
    if not named:
        return
    low, high = ax.get_xlim()
    room = (CHARACTER * len(arrow.never) + 0.1) / scale
    left = far[0] + room > high if sent else far[0] - room >= low
    place = (near if left == sent else far)[0] + 0.05 / scale * (-1 if left else 1)
    style = {"color": LOST, "ha": "right" if left else "left", "zorder": 5}
    write(ax, place, far[1], arrow.never, TYPE, **style)


def point(ax: Axes, begin, end, color: str, width: float = 1.2, **style) -> None:
    """Draw an arrow between two places of the axes."""
    style = {"linestyle": "-", "zorder": 4, "shrinkA": 0, "shrinkB": 0, **style}
    arrow = {"arrowstyle": "-|>", "mutation_scale": 8 + width, "linewidth": width}
    ax.add_patch(FancyArrowPatch(begin, end, color=color, **arrow, **style))
