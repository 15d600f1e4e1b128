"""How every picture looks: the colour of a rank, the type, a box.

Nothing here reads or sets rcParams: a learner's `plt.style.use("dark_background")`
changes neither a colour nor a size of these pictures, and they change nothing of hers.
"""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text

INK, QUIET, RULE, PAPER = "#262626", "#666666", "#d4d4d4", "#ffffff"
FAMILY = "DejaVu Sans"  # comes with matplotlib, so a picture is the same on every machine
WIDTH = 9.0  # inches; wider pictures are scaled down by the notebook

# Okabe and Ito, "Color Universal Design" (2008): told apart under every common colour blindness.
_OKABE_ITO = (
    "#0072B2",  # blue
    "#E69F00",  # orange
    "#009E73",  # green
    "#CC79A7",  # purple
    "#56B4E9",  # sky
    "#D55E00",  # vermillion
    "#F0E442",  # yellow
    "#000000",  # black
)


def rank_color(rank: int) -> str:
    """Return the colour of a rank, the same in every picture, as "#rrggbb".

    Ranks 0 to 7 have the eight colours of Okabe and Ito, which colour-blind readers can
    tell apart. Ranks 8 to 15 have the same hues darkened (and grey after black); rank 16
    starts again with the colour of rank 0. ValueError if rank is negative.
    """
    if rank < 0:
        raise ValueError(f"rank must be at least 0, got {rank}")
    color = _OKABE_ITO[rank % 8]
    if rank % 16 < 8:
        return color.lower()
    return "#8c8c8c" if color == "#000000" else shade(color, 0.52)


def edge_color(rank: int) -> str:
    """Return the rank's colour, darkened where a thin line of it would fade into the paper."""
    color = rank_color(rank)
    return shade(color, 0.75) if luminance(color) > 0.6 else color


# Things that are not ranks (an implementation, a setting) must not wear a rank's colour.
_SERIES = ("#333333", "#882255", "#44aa99", "#6a5acd", "#999933", "#cc6677")


def series_color(index: int) -> str:
    """Return the colour of the index-th line that belongs to no rank."""
    return _SERIES[index % len(_SERIES)]


def marker(index: int) -> str:
    """Return the marker of the index-th line, so that colour is not the only difference."""
    return "os^DvPXp"[index % 8]


def shade(color: str, share: float) -> str:
    """Return `color` darkened: 1 leaves it as it is, 0 is black."""
    return to_hex([channel * share for channel in to_rgb(color)])


def luminance(color: str) -> float:
    """Return the relative luminance of WCAG 2.1: 0 is black, 1 is white."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_color(fill: str) -> str:
    """Return black or white, whichever has the higher contrast on `fill`."""
    light = luminance(fill) + 0.05
    return "#000000" if light / 0.05 >= 1.05 / light else "#ffffff"


def write(ax: Axes, x: float, y: float, text: str, size: float = 9, **style) -> Text:
    """Write text in the house type; `style` as for `Axes.text`."""
    style = {"color": INK, "ha": "left", "va": "center", "family": FAMILY, **style}
    return ax.text(x, y, text, fontsize=size, **style)


def fold(text: str, width: float, size: float = 8.5) -> list[str]:
    """Break text into the lines that fit into `width` inches at `size` points."""
    return textwrap.wrap(text, max(20, int(width / (0.53 * size / 72)))) if text else []


def box(ax: Axes, x: float, y: float, w: float, h: float, fill: str, edge: str, **style) -> None:
    """Draw a box whose top left corner is at (x, y)."""
    style = {"linewidth": 0.8, **style}
    ax.add_patch(Rectangle((x, y), w, h, facecolor=fill, edgecolor=edge, **style))


def chip(ax: Axes, x: float, y: float, w: float, h: float, rank: int, text: str) -> None:
    """Name a rank on a rounded patch of its colour, top left corner at (x, y)."""
    color = rank_color(rank)
    outline = "round,pad=0,rounding_size=0.05"
    ax.add_patch(FancyBboxPatch((x, y), w, h, outline, facecolor=color, edgecolor="none"))
    write(ax, x + w / 2, y + h / 2, text, 8.5, color=text_color(color), ha="center")
