"""The names of collectives above a timeline, so that none covers another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from ddp_kit.plot.style import COLLECTIVE, LOST, TIMES, write
from ddp_kit.plot.timeline_lanes import Link

LEFT, WIDE = 0.75, 7.95  # inches: where the lanes begin on the sheet, and their greatest width
TYPE, CHARACTER = 7.5, 0.0655  # points; inches of one character
SLANT = 35  # degrees, of names that are close together
APART, GAP = 0.23, 0.08  # inches from one name to the next: between slanted ones, level ones


@dataclass(frozen=True)
class Name:
    """What is written above one collective, or above several with the same name.

    begin, end: the places of the first and the last of them. at: the middle of the text or, if it
    is slanted, its left end. text: "" if there is no room for it.
    """

    begin: float
    end: float
    at: float
    text: str
    whole: bool


def place_names(
    links: Sequence[Link], scale: float, low: float, wide: float
) -> tuple[int, list[Name]]:
    """Return how to write the names of collectives: their slant in degrees, and each name.

    Where there is no room for each, neighbours with the same name share one, as in
    "all_reduce x 30". If the names still are too close, they are slanted.

    scale: inches of one unit of the axis; low: where the axis begins; wide: its inches.
    """
    tops = sorted(
        (min(link.points, key=lambda p: p[1])[0], link.name, link.whole) for link in links
    )
    each = [(at, at, name, whole) for at, name, whole in tops]
    shared = []
    for (name, whole), group in itertools.groupby(tops, key=lambda top: top[1:]):
        places = [at for at, *_ in group]
        text = f"{name} {TIMES} {len(places):,}" if len(places) > 1 else name
        shared.append((places[0], places[-1], text, whole))
    for slant, found in ((0, each), (0, shared), (SLANT, each), (SLANT, shared)):
        names, free = [], -math.inf
        for begin, end, text, whole in found:
            at, half = begin + (end - begin) / 2, CHARACTER * len(text) / 2 / scale
            if slant:
                first, last = at, at + APART / scale
            else:  # above the names of the ranks there is nothing else
                at = min(max(at, low - LEFT / scale + half), low + wide / scale - half)
                first, last = at - half, at + half + GAP / scale
            fits = first >= free
            names.append(Name(begin, end, at, text if fits else "", whole))
            free = last if fits else free
        if all(name.text for name in names):
            break
    return slant, names


def head_room(slant: int, names: Sequence[Name]) -> float:
    """Return how many inches the names need above the lanes."""
    longest = max((len(name.text) for name in names), default=0)
    if not longest:
        return 0.0
    room = 0.2 + CHARACTER * longest * math.sin(math.radians(slant))
    return room + 0.08 if _are_shared(names) else room


def write_names(ax: Axes, slant: int, names: Sequence[Name], lane: float) -> None:
    """Write the names above the lanes, each that is shared above a bracket; lane: inches."""
    style = {"rotation": slant, "rotation_mode": "anchor", "va": "baseline"}
    style |= {"ha": "left" if slant else "center"}
    foot, y = -0.5 - 0.02 / lane, -0.55
    top = foot - 0.06 / lane
    if _are_shared(names):
        y = top - 0.03 / lane
    for name in names:
        color = COLLECTIVE[1] if name.whole else LOST
        if name.end > name.begin and name.text:
            xs, ys = (name.begin, name.begin, name.end, name.end), (foot, top, top, foot)
            ax.plot(xs, ys, color=color, linewidth=0.9, linestyle="-", clip_on=False)
        write(ax, name.at, y, name.text, TYPE, color=color, **style)


def _are_shared(names: Sequence[Name]) -> bool:
    return any(name.end > name.begin for name in names)
