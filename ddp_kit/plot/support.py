"""What backends can do: an operation a row, a dtype a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from ddp_kit.plot.numbers import table
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.style import INK, PAPER, QUIET, box, fold, text_color, write

Cells = Mapping[tuple[str, str], str]

# How it went: the fill of a box, its sign, and what the key says. No colour is a rank's.
LOOKS = {
    "works": ("#3c7d78", "✓", "works"),
    "no answer": (PAPER, "·", "refused: no answer is right"),
    "refused": ("#d9d9d9", "✗", "refused"),
    "wrong": ("#882255", "≠", "a wrong answer"),
    "died": ("#333333", "†", "a rank died"),
    "hung": ("#6a5acd", "∞", "hung"),
}
EDGE = "#a6a6a6"
BOX, ROW, GAP, TOP, HEAD, FOOT = 0.28, 0.215, 0.4, 0.42, 1.08, 0.3  # inches
ACROSS = 2  # panels beside each other


def support(places: Mapping[str, Cells | str], title: str | None = None) -> Picture:
    """Draw what works at each place: an operation a row, a dtype a column.

    places maps a name, such as "gloo on the CPU", to a dict (operation, dtype) -> outcome, or to
    a sentence that says why the place cannot be had, which is written below. An outcome begins
    with "works", "no answer" (refused, and rightly so), "refused", "wrong", "died" or "hung";
    what follows a colon is not drawn.

    ValueError if there is no place, or an outcome begins otherwise.
    """
    if not places:
        raise ValueError("places is empty: there is no backend to draw")
    if title is None:
        title = "What works, by operation and dtype"
    there = {name: _read(name, cells) for name, cells in places.items() if _is_there(cells)}
    absent = [f"{name}: {cells}" for name, cells in places.items() if not _is_there(cells)]
    operations = list(dict.fromkeys(op for cells in there.values() for op, _ in cells))
    dtypes = list(dict.fromkeys(kind for cells in there.values() for _, kind in cells))

    parts = [title]
    for name, cells in there.items():
        rows = [[op, *(cells.get((op, kind), "") for kind in dtypes)] for op in operations]
        parts.append(table(name, ["", *dtypes], rows, align="<"))

    left = 0.12 + 0.078 * max((len(op) for op in operations), default=0)
    wide, tall = BOX * len(dtypes), HEAD + ROW * len(operations) + FOOT
    across = min(ACROSS, len(there))
    width = max(6.4, left + across * (wide + GAP) + 0.3)
    below = TOP + tall * -(-len(there) // ACROSS)
    said = [line for sentence in absent for line in fold(sentence, width)]
    full = below + (0.3 if there else 0) + 0.17 * len(said)
    picture = Picture(width, full, "\n".join(parts + absent))
    sheet = picture.sheet()
    write(sheet, 0.02, 0.12, title, 11.5, weight="bold")
    for place, (name, cells) in enumerate(there.items()):
        x = left + place % ACROSS * (wide + GAP)
        y = TOP + place // ACROSS * tall
        _panel(sheet, x, y, name, cells, operations, dtypes)
        if place % ACROSS == 0:
            for row, op in enumerate(operations):
                write(sheet, x - 0.1, y + HEAD + ROW * (row + 0.5), op, 8.5, ha="right")
    if there:
        _key(sheet, below, [kind for kind in LOOKS if kind in _kinds(there)])
    for line, sentence in enumerate(said):
        write(sheet, 0.02, full - 0.17 * (len(said) - line - 0.5), sentence, 8.5, color=QUIET)
    return picture


def _is_there(cells: Cells | str) -> bool:
    return not isinstance(cells, str)


def _read(name: str, cells: Cells) -> dict[tuple[str, str], str]:
    """Return how each cell went, in one of the words of LOOKS."""
    kinds = {cell: outcome.partition(":")[0] for cell, outcome in cells.items()}
    for cell, kind in kinds.items():
        if kind not in LOOKS:
            raise ValueError(
                f"{name!r} has {cells[cell]!r} for {cell}: an outcome begins with "
                f"one of {', '.join(LOOKS)}"
            )
    return kinds


def _kinds(there: Mapping[str, Cells]) -> set[str]:
    return {kind for cells in there.values() for kind in cells.values()}


def _panel(
    sheet: Axes,
    x: float,
    y: float,
    name: str,
    cells: Cells,
    operations: Sequence[str],
    dtypes: Sequence[str],
) -> None:
    """Draw the boxes of one place; (x, y): the top left corner, without the names of rows."""
    write(sheet, x, y + 0.1, name, 9.5, weight="bold")
    for column, kind in enumerate(dtypes):
        style = {"rotation": 50, "rotation_mode": "anchor", "va": "baseline"}
        write(sheet, x + BOX * (column + 0.55), y + HEAD - 0.06, kind, 8.5, **style)
    for row, op in enumerate(operations):
        for column, kind in enumerate(dtypes):
            if (op, kind) in cells:
                _cell(sheet, x + BOX * column, y + HEAD + ROW * row, cells[op, kind])


def _cell(sheet: Axes, x: float, y: float, kind: str) -> None:
    fill, sign, _ = LOOKS[kind]
    box(sheet, x + 0.015, y + 0.015, BOX - 0.03, ROW - 0.03, fill, EDGE, linewidth=0.5)
    write(sheet, x + BOX / 2, y + ROW / 2, sign, 8.5, color=text_color(fill), ha="center")


def _key(sheet: Axes, y: float, kinds: Sequence[str]) -> None:
    x = 0.02
    for kind in kinds:
        _cell(sheet, x, y - ROW / 2, kind)
        write(sheet, x + BOX + 0.07, y, LOOKS[kind][2], 8.5, color=INK)
        x += BOX + 0.35 + 0.06 * len(LOOKS[kind][2])
