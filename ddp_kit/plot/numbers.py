"""Numbers as text: in a box, on an axis, in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence


def short(value: complex) -> str:
    """Write a number for a small box: "3" for 3.0, "0.333" for a third."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if math.isfinite(value) and value == int(value) and abs(value) < 1e8:
        return str(int(value))
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def significant(value: float, digits: int = 3) -> str:
    """Write a positive number with so many significant digits and no exponent."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    value = float(f"{value:.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, decimals)}f}"


def size(nbytes: float) -> str:
    """Write a number of bytes with its decimal unit: "192 B", "4.1 kB", "1 MB"."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(max(0, math.floor(math.log10(max(nbytes, 1)) / 3)), len(units) - 1)
    number = float(f"{nbytes / 1000**power:.2g}") if power else round(nbytes)
    if number >= 1000 and power + 1 < len(units):
        number, power = number / 1000, power + 1
    return f"{number:g} {units[power]}"


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], align: str = ">"
) -> str:
    """Return rows of text as lines of columns under a title.

    The first column is aligned left, the others as `align` says: "<" left, ">" right.
    """
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligns = ["<"] + [align] * (len(header) - 1)
    written = [
        "  ".join(f"{text:{a}{w}}" for text, a, w in zip(line, aligns, widths, strict=True))
        for line in lines
    ]
    return "\n".join([title, *(line.rstrip() for line in written)])
