"""Which rank computes what, and when: cells of a pipeline, scores of attention, schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Polygon
from matplotlib.ticker import MaxNLocator

from ddp_kit.errors import PlotError
from ddp_kit.plot import style
from ddp_kit.plot.picture import Picture, open_picture, read_ranks, short, table
from ddp_kit.plot.style import NO_CALL, PAPER, QUIET, WIDTH, bars, chip, rank_color, write

KINDS = {  # name, fill
    "F": ("forward", "#8fa9c4"),
    "B": ("backward", "#dcc48e"),
    "I": ("backward of the input", "#e3a9b4"),
    "W": ("backward of the weights", "#8fb8b0"),
}
LEFT, TOP, ROW, HIGH = 0.9, 0.42, 0.42, 0.3  # inches of a pipeline
ROOM = 0.085  # inches that a digit needs
LOWER, PALER = 0.45, 0.35  # the boxes of a rank's last stage, beside those of its first
SIDE = 3.0  # inches of the matrix of scores
LOW, HEAD, AXIS = 0.3, 0.3, 0.42  # inches of a schedule: of a row, above them, below them
LETTER = 0.075  # inches of a letter of a label


class Cell(NamedTuple):
    """What a rank computed for one micro-batch, and of which stage."""

    kind: str
    micro_batch: int
    start: float
    end: float
    stage: int


def pipeline(
    result: Iterable[Iterable[Sequence[Any]]],
    title: str | None = None,
    unit: str = "s",
    until: float = 0,
) -> Picture:
    """Draw the forwards and backwards of micro-batches that each rank of a pipeline computed.

    result[rank] has a rank's cells in their order, each (kind, micro_batch, start, end) or (kind,
    micro_batch, start, end, stage). The kind is "F" for a forward, "B" for a backward, or "I" and
    "W" for its halves, the gradients of the stage's input and of its weights. Without a stage, the
    stage is the rank. unit: of start and end, which all ranks count from one moment. until: how far
    the axis reaches at least, so that two pictures can be compared.

    If a rank has several stages, the boxes of a later one are lower and paler.

    The text has the order of each rank's cells, and no times: "F0 F1 B0 B1", or with the stage in
    front, as in "0F0 4F0", if a rank has cells of several stages.

    Raises PlotError if no rank has a cell, or a cell is none of the above.
    """
    ranks = [_cells(cells, rank) for rank, cells in enumerate(read_ranks(result))]
    if not any(ranks):
        raise PlotError("no rank has a cell: there is nothing to draw")
    title = "What each rank of the pipeline computed" if title is None else title
    several = any(len({cell.stage for cell in cells}) > 1 for cells in ranks)
    rows = [
        [f"rank {rank}", " ".join(_name(cell, several) for cell in cells) or "nothing"]
        for rank, cells in enumerate(ranks)
    ]
    header = "stage, kind and micro-batch" if several else "kind and micro-batch"
    text_table = table(title, ["", header], rows, align="<")

    cells = [cell for rank in ranks for cell in rank]
    begin, end = min(cell.start for cell in cells), max(cell.end for cell in cells)
    length = (end - begin) or 1.0
    busy = sum(cell.end - cell.start for cell in cells)
    idle = 1 - busy / (len(ranks) * length)
    caption = (
        "The number in a box is its micro-batch. Blank"
        f"{' until the last box ends' if until > length else ''} is the bubble, here "
        f"{100 * idle:.1f} % of the time of all ranks."
    )
    if several:
        caption += " The boxes of a rank's later stage are lower and paler."
    height, width = len(ranks) * ROW, WIDTH - LEFT - 0.15
    picture, sheet = open_picture(title, text_table, WIDTH, TOP + height + 0.82, caption)
    ax = picture.chart(LEFT, TOP, width, height, "x", xlabel=f"time ({unit})")
    length = max(length, until)
    ax.set(xlim=(0, length), ylim=(len(ranks), 0))
    ax.set_yticks([])
    for rank, own in enumerate(ranks):
        middle = TOP + (rank + 0.5) * ROW
        stages = sorted({cell.stage for cell in own})
        chip(sheet, 0, middle - 0.06 * several, 0.72, rank, f"rank {rank}")
        if several:
            named = ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))
            write(sheet, 0.36, middle + 0.12, named, 7, ha="center", color=QUIET)
        bottom = rank + (1 + HIGH / ROW) / 2
        for cell in own:
            later = stages.index(cell.stage) / max(1, len(stages) - 1)  # from 0 to 1
            fill = style.blend(KINDS[cell.kind][1], PAPER, PALER * later)
            high = (1 - LOWER * later) * HIGH / ROW
            x, wide = cell.start - begin, cell.end - cell.start
            bars(ax, [(x, wide)], (bottom - high, high), fill, style.EDGE, linewidth=0.5)
            number = str(cell.micro_batch)
            if wide / length * width > ROOM * len(number):
                look = {"ha": "center", "color": style.text_color(fill)}
                write(ax, x + wide / 2, bottom - high / 2, number, 8, **look)
    drawn = {cell.kind for cell in cells}
    looks = {name: (fill, style.EDGE) for kind, (name, fill) in KINDS.items() if kind in drawn}
    style.draw_key(sheet, LEFT, TOP + height + 0.58, looks)
    return picture


def _cells(cells: Any, rank: int) -> list[Cell]:
    if not isinstance(cells, Iterable):
        raise PlotError(f"a rank's cells must be a list, got {short(cells)}")
    read: list[Cell] = []
    for given in cells:
        values = tuple(given) if isinstance(given, Iterable) else (given,)
        if len(values) not in (4, 5) or values[0] not in KINDS:
            raise PlotError(
                "a cell must be (kind, micro_batch, start, end) or (kind, micro_batch, start, end, "
                f'stage), with the kind "F", "B", "I" or "W", got {short(given)}'
            )
        cell = Cell(*values[:4], values[4] if len(values) == 5 else rank)
        times = cell.start, cell.end
        if not all(isinstance(time, (int, float)) and math.isfinite(time) for time in times):
            raise PlotError(f"start and end of a cell must be finite numbers, got {given!r}")
        read.append(cell)
    return read


def _name(cell: Cell, several: bool) -> str:
    return f"{cell.stage if several else ''}{cell.kind}{cell.micro_batch}"


class Block(NamedTuple):
    """A block of scores: the step, the positions of queries and keys, and how many are computed."""

    step: int
    queries: range
    keys: range
    pairs: int


def attention(result: Iterable[Sequence[Any]], title: str | None = None) -> Picture:
    """Draw the matrix of scores in the colours of the ranks that compute them, and their work.

    result[rank] lists what the rank computes: (step, queries, keys, pairs), where queries and
    keys are ranges of positions, steps count from 0, and pairs is how many scores are computed.
    On the right, a step takes as long as the rank with most pairs in it.

    Raises PlotError if there is no rank, a rank lists something else, or nothing is computed.
    """
    ranks = [_blocks(rank, value) for rank, value in enumerate(read_ranks(result))]
    blocks = [block for done in ranks for block in done]
    if not blocks:
        raise PlotError("no rank computes anything: there is nothing to draw")
    length = max(max(block.queries.stop, block.keys.stop) for block in blocks)
    steps = range(1 + max(block.step for block in blocks))
    work = [[sum(b.pairs for b in done if b.step == step) for step in steps] for done in ranks]
    title = "Which rank computes which scores" if title is None else title
    rows = [
        [f"rank {rank}", *(f"{pairs:,}" for pairs in each), f"{sum(each):,}"]
        for rank, each in enumerate(work)
    ]
    named = [f"step {step}" for step in steps]
    text_table = table(f"{title} (pairs)", ["", *named, "in all"], rows)

    causal = len(blocks) > 1 and all(b.keys.start <= b.queries.start for b in blocks)
    idle = any(min(pairs) < max(pairs) for pairs in zip(*work, strict=True))
    caption = (
        "A number is the step. White: not computed."
        + causal * " Pale: computed, but masked, because the key comes after the query."
        + idle * " Grey: a rank waits for the one that has most to do."
        + " Dashed: all ranks are done."
    )
    picture, sheet = open_picture(title, text_table, WIDTH - 0.25, SIDE + 1.16, caption)
    named = f"keys 0 to {length - 1}", f"queries 0 to {length - 1}"
    matrix = picture.chart(0.3, 0.66, SIDE, SIDE, "x", *named)
    matrix.xaxis.set_label_position("top")
    matrix.set(xlim=(0, length), ylim=(length, 0), xticks=[], yticks=[])
    matrix.spines[["top", "right"]].set(visible=True, color=QUIET, linewidth=0.8)
    for rank, done in enumerate(ranks):
        for block in done:
            _draw_block(matrix, rank, block, causal and block.queries == block.keys)
    ax = picture.chart(4.35, 0.66, 4.05, SIDE, "x", "pairs, one after the other")
    for rank in range(len(ranks)):
        chip(sheet, 3.63, 0.66 + SIDE * (rank + 0.5) / len(ranks), 0.58, rank, f"rank {rank}")
    longest = sum(map(max, zip(*work, strict=True)))
    _draw_work(ax, work, max(length**2 / len(ranks), longest))
    return picture


def _blocks(rank: int, value: Any) -> list[Block]:
    try:
        blocks = [Block(*block) for block in value]
        right = all(
            b.step >= 0
            and b.pairs >= 0
            and isinstance(b.queries, range)
            and isinstance(b.keys, range)
            for b in blocks
        )
    except TypeError:
        right = False
    if not right:
        raise PlotError(
            f"rank {rank} must list (step, queries, keys, pairs) with ranges, got {short(value)}"
        )
    return [block for block in blocks if block.pairs]


def _draw_block(ax: Axes, rank: int, block: Block, masked: bool) -> None:
    fill, (x, y) = rank_color(rank), (block.keys.start, block.queries.start)
    wide, tall = len(block.keys), len(block.queries)
    bars(ax, [(x, wide)], (y, tall), fill, PAPER)
    if masked:
        corners = [(x, y), (x + wide, y), (x + wide, y + tall)]
        ax.add_patch(Polygon(corners, facecolor=PAPER, alpha=0.65, edgecolor="none", zorder=2))
    place = (x + wide * (0.32 if masked else 0.5), y + tall * (0.68 if masked else 0.5))
    look = {"color": style.text_color(fill), "ha": "center", "zorder": 3}
    write(ax, *place, str(block.step), 8.5, **look)


def _draw_work(ax: Axes, work: Sequence[Sequence[int]], most: float) -> None:
    """Draw the work of each rank along time: each step lasts as long as the longest."""
    ax.set(xlim=(0, 1.02 * most), ylim=(len(work), 0), yticks=[])  # shows a line at the end, too
    start = 0
    for step, pairs in enumerate(zip(*work, strict=True)):
        for rank, count in enumerate(pairs):
            fill, bar = rank_color(rank), (rank + 0.22, 0.56)
            bars(ax, [(start, max(pairs))], bar, NO_CALL, PAPER)
            bars(ax, [(start, count)], bar, fill, PAPER)
            if count:
                look = {"color": style.text_color(fill), "ha": "center"}
                write(ax, start + count / 2, rank + 0.5, str(step), 8.5, **look)
        start += max(pairs)
    ax.axvline(start, color=QUIET, linewidth=0.8, linestyle=style.DASHES)


def schedules(
    given: Mapping[str, Sequence[tuple[int, float, float, str]]],
    title: str,
    along: str,
    names: Sequence[str] = (),
) -> Picture:
    """Draw schedules above each other.

    given: by its title, the spans of a schedule, each (rank, start, end, label). along: what the
    axis is. names: of the rows, if they are no ranks.

    Raises PlotError if there is no span.
    """
    ranks = 1 + max((span[0] for spans in given.values() for span in spans), default=-1)
    names = names or [f"rank {rank}" for rank in range(ranks)]
    lines = [
        [name, names[rank], " ".join(label for row, _, _, label in spans if row == rank)]
        for name, spans in given.items()
        for rank in sorted({span[0] for span in spans})
    ]
    if not lines:
        raise PlotError("no schedule has a span: there is nothing to draw")
    text_table = table(title, ["", "", "what"], lines, align="<")
    ends = [end for spans in given.values() for _, _, end, _ in spans]
    length, height = max(ends) or 1, LOW * ranks
    below = HEAD + len(given) * (HEAD + height + AXIS)
    picture, sheet = open_picture(title, text_table, WIDTH, below)
    width, top = WIDTH - LEFT - 0.15, HEAD
    for name, spans in given.items():
        write(sheet, LEFT, top + HEAD / 2, name, 9.5)
        top += HEAD
        ax = picture.chart(LEFT, top, width, height, "x", xlabel=along)
        ax.set(xlim=(0, length), ylim=(ranks, 0), yticks=[])
        whole = all(float(end).is_integer() for end in ends)
        ax.xaxis.set_major_locator(MaxNLocator(integer=whole))
        for rank in range(ranks):
            write(sheet, LEFT - 0.1, top + (rank + 0.5) * LOW, names[rank], 8.5, ha="right")
        for rank, start, end, label in spans:
            fill, bar = rank_color(rank), (rank + 0.1, 0.8)
            bars(ax, [(start, end - start)], bar, fill, style.EDGE, linewidth=0.5)
            if (end - start) / length * width > LETTER * len(label):
                look = {"ha": "center", "color": style.text_color(fill)}
                write(ax, (start + end) / 2, rank + 0.5, label, 7.5, **look)
        top += height + AXIS
    return picture
