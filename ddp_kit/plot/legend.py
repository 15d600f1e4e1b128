"""The words around a timeline: names of collectives, the key, the caption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from ddp_kit.plot.lanes import Lanes, Link
from ddp_kit.plot.marks import CHARACTER, COMPUTING, LOOKS, LOST, TYPE, band
from ddp_kit.plot.style import write

SLANT = 35  # degrees, of the names of collectives that stand close
NAMES = {"send": "sending", "recv": "waiting to receive", "collective": "in a collective"}


@dataclass(frozen=True)
class Name:
    """The name of a collective above the lanes; text is "" where it has no room."""

    at: float
    text: str
    slant: float
    whole: bool


def place_names(links: Sequence[Link], scale: float) -> list[Name]:
    """Choose where to write the names of collectives: level, slanted, or not at all."""
    tops = sorted((min(link.points, key=lambda p: p[1])[0], link.name, link) for link in links)
    for slant in (0, SLANT):
        names, free = [], -math.inf
        for at, text, link in tops:
            wide = CHARACTER * len(text)
            half, gap = (wide / 2, 0.08) if not slant else (0, 0.2)
            if slant or at * scale - half >= free:
                shown = text if at * scale - half >= free else ""
                names.append(Name(at, shown, slant, link.whole))
                free = at * scale + half + gap if shown else free
        if len(names) == len(tops):
            return names
    return names


def head_room(names: Sequence[Name]) -> float:
    """Return how many inches the names need above the lanes."""
    longest = max((len(name.text) for name in names), default=0)
    if not longest:
        return 0.0
    slant = math.radians(names[0].slant)
    return 0.2 + CHARACTER * longest * math.sin(slant)


def write_names(ax: Axes, names: Sequence[Name]) -> None:
    """Write the names of collectives above the lanes."""
    for name in names:
        style = {"rotation": name.slant, "rotation_mode": "anchor", "va": "baseline"}
        style |= {"ha": "left" if name.slant else "center"}
        color = LOOKS["collective"][1] if name.whole else LOST
        write(ax, name.at, -0.55, name.text, TYPE, color=color, **style)


def caption(lanes: Lanes, names: Sequence[Name], timed: bool) -> str:
    """Say what cannot be read off the picture."""
    said = ["A bar a rank."]
    said += ["An arrow is a message, in its sender's colour."] if lanes.arrows else []
    if not timed:
        said = ["An operation takes a step; computing takes none."]
        said += ["An arrow is a message."] if lanes.arrows else []
    if lanes.links:
        when = ", when the last of its ranks came" if timed else ""
        said.append(f"A vertical line is a collective{when}.")
    if any(not name.text for name in names):
        said.append("Some names of collectives have no room.")
    if any(not link.whole for link in lanes.links):
        said.append("A dashed line: not all ranks came to it, or not to the same one.")
    if any(arrow.never for arrow in lanes.arrows):
        said.append("A dashed arrow: a message that was never sent or never received.")
    return " ".join(said)


def key(sheet: Axes, x: float, y: float, lanes: Lanes, timed: bool) -> None:
    """Say what the bars mean that occur; x, y: inches on the sheet."""
    kinds = {bar.kind for bar in lanes.bars}
    if timed:
        place = (y - 0.06, 0.14)
        sheet.broken_barh([(x, 0.26)], place, facecolor=COMPUTING, edgecolor="none")
        write(sheet, x + 0.34, y + 0.01, "computing", 8.5)
        x += 1.25
    for kind, said in NAMES.items():
        if kind in kinds:
            band(sheet, kind, [(x, 0.26)], y - 0.06, y + 0.08)
            write(sheet, x + 0.34, y + 0.01, said, 8.5)
            x += 0.6 + 0.075 * len(said)
