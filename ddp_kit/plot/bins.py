"""A timeline of too many events to draw one by one: shares of time, and counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Polygon

from ddp_kit.plot.lanes import Lanes
from ddp_kit.plot.marks import DASHES, HALF, LOOKS, LOST, TYPE, dress, lanes_of, point
from ddp_kit.plot.style import edge_color, write

BINS = 60
MOST_ARROWS = 64  # in the whole picture
KINDS = ("send", "recv", "collective")


def draw(ax: Axes, lanes: Lanes) -> None:
    """Draw each rank's shares of time in BINS parts, and arrows that stand for many messages."""
    lanes_of(ax, lanes)
    edges = np.linspace(*lanes.limits, BINS + 1)
    for rank, shares in enumerate(_shares(lanes, edges)):
        floor = np.full(BINS, rank + HALF)
        for kind, share in zip(KINDS, shares, strict=True):
            ceiling = floor - 2 * HALF * share
            if share.any():
                _stairs(ax, kind, edges, floor, ceiling)
            floor = ceiling
    for src, dst, at, count, never in _arrows(lanes):
        side = HALF if dst > src else -HALF
        color = LOST if never else edge_color(src)
        style = {"linestyle": DASHES if never else "-"}
        point(ax, (at, src + side), (at, dst - side), color, 0.9, **style)
        # Between two lanes, where an arrow down begins and one up ends: there they are alone.
        text, between, ha = (f" {count:,}", src + 0.5, "left")
        if dst < src:
            text, between, ha = (f"{count:,} ", dst + 0.5, "right")
        write(ax, at, between, text, TYPE - 0.5, color=color, ha=ha, zorder=5)


def caption(lanes: Lanes) -> str:
    """Say what stands for what."""
    said = [
        f"Too many events to draw one by one: the height of a colour is its share of each "
        f"1/{BINS} of the picture."
    ]
    pairs, parts = _pairs(lanes), _parts(lanes)
    if pairs and parts:
        part = f"in each 1/{parts}" if parts > 1 else "in the whole"
        said.append(f"An arrow is all messages of its pair {part} of the picture; its number, how")
        said.append("many.")
    elif pairs:
        said.append(f"No arrows: {len(pairs)} pairs of ranks. kit.plot.messages shows them.")
    if any(arrow.never for arrow in lanes.arrows):
        said.append("Dashed: never received, or never sent.")
    if lanes.links:
        said.append("Collectives have no line of their own here.")
    return " ".join(said)


def _stairs(ax: Axes, kind: str, edges: np.ndarray, floor: np.ndarray, ceiling: np.ndarray) -> None:
    """Fill between two heights for each bin, as one shape: sixty would take a second to draw."""
    x = np.repeat(edges, 2)[1:-1]
    above, below = np.repeat(ceiling, 2), np.repeat(floor, 2)
    outline = np.column_stack([np.append(x, x[::-1]), np.append(above, below[::-1])])
    fill, edge, hatch = LOOKS[kind]
    shape = Polygon(outline, facecolor=fill, edgecolor=edge, linewidth=0, zorder=2)
    dress(shape, hatch, edge)
    ax.add_patch(shape)


def _shares(lanes: Lanes, edges: np.ndarray) -> np.ndarray:
    """Return the share of each bin that each rank spends: (rank, kind, bin)."""
    shares = np.zeros((len(lanes.spans), len(KINDS), len(edges) - 1))
    places: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bar in lanes.bars:
        places.setdefault((bar.rank, bar.kind), []).append((bar.begin, bar.end))
    for (rank, kind), spans in places.items():
        begin, end = np.array(spans).T
        covered = [np.clip(edge - begin, 0, end - begin).sum() for edge in edges]
        shares[rank, KINDS.index(kind)] = np.diff(covered) / np.diff(edges)
    return shares / np.maximum(1, shares.sum(axis=1, keepdims=True))


def _pairs(lanes: Lanes) -> list[tuple[int, int, str]]:
    known = [arrow for arrow in lanes.arrows if arrow.src is not None]
    return sorted({(arrow.src, arrow.dst, arrow.never) for arrow in known})


def _parts(lanes: Lanes) -> int:
    """Return into how many parts the messages of a pair are counted; 0: too many pairs."""
    return min(10, MOST_ARROWS // max(1, len(_pairs(lanes))))


def _arrows(lanes: Lanes) -> list[tuple[int, int, float, int, str]]:
    """Count messages by pair and part: (src, dst, place, count, never)."""
    pairs, parts = _pairs(lanes), _parts(lanes)
    if not parts:
        return []
    begin, end = lanes.limits
    width = (end - begin) / parts
    counts: Counter[tuple[tuple[int, int, str], int]] = Counter()
    for arrow in lanes.arrows:
        at = arrow.begin if arrow.begin is not None else arrow.end
        if arrow.src is not None:
            part = min(parts - 1, int((at - begin) / width))
            counts[(arrow.src, arrow.dst, arrow.never), part] += 1
    # Side by side within a part: arrows of one place would cover each other.
    shift = {pair: (i + 0.5) / len(pairs) for i, pair in enumerate(pairs)}
    return [
        (*pair[:2], begin + (part + shift[pair]) * width, count, pair[2])
        for (pair, part), count in sorted(counts.items())
    ]
