"""What backends support: one row per operation, one column per dtype."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import Picture, open_picture, read_named, table
from ddp_kit.plot.style import PAPER, box, key_place, write

Cells = Mapping[tuple[str, str], str]

# The outcomes: the fill of a box, its sign, and its text in the key. No colour is that of a
# rank or of a series.
LOOKS = {
    "works": ("#3c7d78", "✓", "works"),
    "no answer": (PAPER, "·", "refused: no answer is right"),
    "refused": ("#d9d9d9", "✗", "refused"),
    "wrong": ("#882255", "≠", "a wrong answer"),
    "died": ("#333333", "†", "a rank died"),
    "hung": ("#401010", "∞", "hung"),
}
EDGE = "#a6a6a6"
BOX, ROW, GAP, TOP, HEAD, FOOT = 0.28, 0.215, 0.4, 0.42, 1.08, 0.3  # inches
ACROSS = 2  # panels side by side


def support(places: Mapping[str, Cells | str], title: str | None = None) -> Picture:
    """Draw what each place supports: one row per operation, one column per dtype.

    places maps a name, such as "gloo on the CPU", to a dict (operation, dtype) -> outcome, or to
    a sentence that says why it is unavailable, which is written below. An outcome begins with
    "works", "no answer" (refused, and rightly so), "refused", "wrong", "died" or "hung"; what
    follows a colon is not drawn.

    Raises PlotError if there is no place, or an outcome begins otherwise.
    """
    read_named("places", places, "each name to a dict or a sentence")
    title = "What works, by operation and dtype" if title is None else title
    panels = {n: _read(n, cells) for n, cells in places.items() if not isinstance(cells, str)}
    reasons = [f"{name}: {why}" for name, why in places.items() if isinstance(why, str)]
    operations = list(dict.fromkeys(op for cells in panels.values() for op, _ in cells))
    dtypes = list(dict.fromkeys(kind for cells in panels.values() for _, kind in cells))

    parts = [title]
    for name, cells in panels.items():
        rows = [[op, *(cells.get((op, kind), "") for kind in dtypes)] for op in operations]
        parts.append(table(name, ["", *dtypes], rows, align="<"))

    left = 0.12 + 0.078 * max((len(op) for op in operations), default=0)
    wide, tall = BOX * len(dtypes), HEAD + ROW * len(operations) + FOOT
    across = min(ACROSS, len(panels))
    found = {kind for cells in panels.values() for kind in cells.values()}
    width = max(8.4, left + across * (wide + GAP) + 0.3)
    key = TOP + tall * -(-len(panels) // ACROSS)
    kinds = [kind for kind in LOOKS if kind in found]
    below = key + (key_place(len(kinds) - 1, 3)[1] + 0.25 if kinds else 0)
    text_table = "\n".join(parts + reasons)
    picture, sheet = open_picture(title, text_table, width, below, "\n".join(reasons))
    for place, (name, cells) in enumerate(panels.items()):
        x = left + place % ACROSS * (wide + GAP)
        y = TOP + place // ACROSS * tall
        write(sheet, x, y + 0.1, name, 9.5, weight="bold")
        for column, dtype in enumerate(dtypes):
            style = {"rotation": 50, "rotation_mode": "anchor", "va": "baseline"}
            write(sheet, x + BOX * (column + 0.55), y + HEAD - 0.06, dtype, 8.5, **style)
        for row, op in enumerate(operations):
            if place % ACROSS == 0:
                write(sheet, x - 0.1, y + HEAD + ROW * (row + 0.5), op, 8.5, ha="right")
            for column, dtype in enumerate(dtypes):
                if (op, dtype) in cells:
                    _cell(sheet, x + BOX * column, y + HEAD + ROW * row, cells[op, dtype])
    for number, kind in enumerate(kinds):
        x, y = key_place(number, 3)
        _cell(sheet, x, key + y - ROW / 2, kind)
        write(sheet, x + BOX + 0.07, key + y, LOOKS[kind][2], 8.5)
    return picture


def _read(name: str, cells: Cells) -> dict[tuple[str, str], str]:
    kinds = {cell: outcome.partition(":")[0] for cell, outcome in cells.items()}
    for cell, kind in kinds.items():
        if kind not in LOOKS:
            raise PlotError(
                f"{name!r} has {cells[cell]!r} for {cell}: an outcome must begin with "
                f"one of {', '.join(LOOKS)}"
            )
    return kinds


def _cell(sheet: Axes, x: float, y: float, kind: str) -> None:
    fill, sign, _ = LOOKS[kind]
    x, y = x + 0.015, y + 0.015
    box(sheet, x, y, BOX - 0.03, ROW - 0.03, fill, EDGE, sign, 8.5, linewidth=0.5)
