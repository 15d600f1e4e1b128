"""How every picture looks: colours, type, boxes, arrows, and numbers as text.

Nothing here reads or sets rcParams: a learner's `plt.style.use("dark_background")` does not
change these pictures, and they do not change hers. A picture has paper of its own, and so it can
be read on a dark page.

A colour means one thing in every picture:

- a rank, or the device it has, has the colour of `rank_color`, and so has what comes from it: its
  messages as arrows, its numbers, its losses;
- what a rank is in has a fill and a hatch: dark grey is a send, hatched violet a receive, dotted
  green a collective, and pale blue no call (`SEND`, `RECV`, `COLLECTIVE`, `NO_CALL`);
- wine (`LOST`) is what went wrong or came late;
- a setting or an implementation has an earthy colour of `series_color`, which is far from all of
  these, and a marker of its own;
- what only has a size is a tone of grey or slate: darker is more.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.text import Text

from ddp_kit.errors import PlotError

INK, QUIET, PAPER = "#262626", "#666666", "#ffffff"
EDGE = "#3f4f5f"  # of bars that belong to no rank
LOST = "#882255"  # what went wrong or came late
DASHES = (0, (3, 2))
TIMES = "\N{MULTIPLICATION SIGN}"
NOTHING = "\N{EN DASH}"  # in place of a number
FAMILY = "DejaVu Sans"  # comes with matplotlib, so a picture is the same on every machine
WIDTH = 9.0  # inches; wider pictures are scaled down by the notebook
KEY_ROW = 0.21  # inches of a row of a key
CHIP = 0.21  # inches, the height of a rank's name

# Okabe and Ito, "Color Universal Design" (2008): distinct under every common colour blindness.
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
    distinguish. Ranks 8 to 15 have the same hues darkened (and grey instead of black); rank 16
    starts again with the colour of rank 0. Raises PlotError if rank is negative.
    """
    if rank < 0:
        raise PlotError(f"rank must be at least 0, got {rank}")
    color = _OKABE_ITO[rank % 8]
    if rank % 16 < 8:
        return color.lower()
    return "#8c8c8c" if color == "#000000" else blend("#000000", color, 0.52)


def edge_color(rank: int) -> str:
    """Return the rank's colour, darkened where a thin line of it would fade into the paper."""
    color = rank_color(rank)
    return blend("#000000", color, 0.75) if luminance(color) > 0.6 else color


# What a rank is in: fill, edge, hatch. In grey they still differ.
SEND = ("#454545", "#222222", None)
RECV = ("#dfdaf8", "#6a5acd", "/////")
COLLECTIVE = ("#b9e0da", "#2b7f73", ".....")
NO_CALL = "#e3e8ee"

# Earthy: at least 25 units of CIELAB away from the eight colours above and from what a rank is in.
_SERIES = ("#703010", "#688098", "#888038", "#104000", "#a89088", "#c87060")


def series_color(index: int) -> str:
    return _SERIES[index % len(_SERIES)]


def marker(index: int) -> str:
    """Return the marker of the index-th line, so that colour is not the only difference."""
    return "os^DvPXp"[index % 8]


def blend(first: str, second: str, share: float) -> str:
    """Return the colour between two others: 0 is the first, 1 the second."""
    pairs = zip(to_rgb(first), to_rgb(second), strict=True)
    return to_hex([a + (b - a) * share for a, b in pairs])


def luminance(color: str) -> float:
    """Return the relative luminance of WCAG 2.1: 0 is black, 1 is white."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_color(fill: str) -> str:
    """Return black or white, whichever has the higher contrast on `fill`."""
    light = luminance(fill) + 0.05
    return "#000000" if light / 0.05 >= 1.05 / light else "#ffffff"


def write(ax: Axes, x: float, y: float, text: str, size: float = 9, **style) -> Text:
    """Write text in the font of all pictures; `style` as for `Axes.text`."""
    style = {"color": INK, "ha": "left", "va": "center", "family": FAMILY, **style}
    return ax.text(x, y, text, fontsize=size, parse_math=False, **style)  # a $ is a $


def fold(text: str, width: float, size: float = 8.5) -> list[str]:
    """Break each line of a text into the lines that fit into `width` inches at `size` points."""
    letters = max(20, int(width / (0.53 * size / 72)))
    return [part for line in text.splitlines() for part in textwrap.wrap(line, letters)]


def box(
    ax: Axes, x: float, y: float, w: float, h: float, fill: str, edge: str, text="", size=9, **style
) -> None:
    """Draw a box whose top left corner is at (x, y), with text in its middle."""
    style = {"linewidth": 0.8, **style}
    ax.add_patch(Rectangle((x, y), w, h, facecolor=fill, edgecolor=edge, **style))
    if text:
        write(ax, x + w / 2, y + h / 2, text, size, color=text_color(fill), ha="center")


def chip(ax: Axes, x: float, middle: float, w: float, rank: int, text: str) -> None:
    """Name a rank on a rounded patch of its colour, whose left edge has its middle there."""
    color = rank_color(rank)
    outline = "round,pad=0,rounding_size=0.05"
    corner = x, middle - CHIP / 2
    ax.add_patch(FancyBboxPatch(corner, w, CHIP, outline, facecolor=color, edgecolor="none"))
    write(ax, x + w / 2, middle, text, 8.5, color=text_color(color), ha="center")


def arrow(ax: Axes, begin, end, color: str, width: float = 1.2, **style) -> None:
    style = {"linestyle": "-", "zorder": 4, "mutation_scale": 8 + width, **style}
    style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "linewidth": width, **style}
    ax.add_patch(FancyArrowPatch(begin, end, color=color, **style))


def bars(ax: Axes, ranges, span, fill: str, edge: str, hatch: str | None = None, **style):
    """Draw bars, as (begin, length) each; span: their (low, height)."""
    style = {"linewidth": 0.7, "linestyle": "-", **style}
    drawn = ax.broken_barh(ranges, span, facecolor=fill, edgecolor=edge, **style)
    set_hatch(drawn, hatch, edge)
    return drawn


def set_hatch(drawn, hatch: str | None, color: str) -> None:
    """Hatch a shape with lines of our own colour and width."""
    if hatch:
        drawn.set_hatch(hatch)
        for name, value in (("set_hatchcolor", color), ("set_hatch_linewidth", 0.7)):
            if hasattr(drawn, name):  # before matplotlib 3.11 and 3.10 only rcParams can set it
                getattr(drawn, name)(value)


def key_place(index: int, columns: int) -> tuple[float, float]:
    """Return the top left corner of an entry of a key, in inches, with that many in a row."""
    return index % columns * 8.4 / columns, index // columns * KEY_ROW


def draw_key(
    sheet: Axes, left: float, top: float, looks: Mapping[str, tuple], columns: int = 4
) -> None:
    """Draw a key; looks: what each text stands for, as a fill, an edge and perhaps a hatch."""
    for index, (text, look) in enumerate(looks.items()):
        x, y = key_place(index, columns)
        bars(sheet, [(left + x, 0.26)], (top + y, 0.14), *look)
        write(sheet, left + x + 0.34, top + y + 0.07, text, 8.5)


def significant(value: float) -> str:
    """Return a number with three significant digits and no exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value or 0:g}"  # or: -0.0 is written "0"
    value = float(f"{value:.2e}")
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, decimals)}f}"


def byte_size(nbytes: float, digits: int = 2) -> str:
    """Return a number of bytes with its decimal unit: "192 B", "4.1 kB", "1 MB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(max(0, math.floor(math.log10(max(nbytes, 1)) / 3)), len(units) - 1)
    number = float(f"{nbytes / 1000**power:.{digits}g}") if power else round(nbytes)
    if number >= 1000 and power + 1 < len(units):
        number, power = number / 1000, power + 1
    return f"{number:g} {units[power]}"
