"""Which rank computes which pairs of a query and a key, and in which step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.patches import Polygon

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import Picture, open_picture, read_ranks, short, table
from ddp_kit.plot.style import NO_CALL, PAPER, QUIET, chip, fold, rank_color, text_color, write

TOP, SIDE, LEFT, BARS_LEFT, WIDE = 0.66, 3.0, 0.3, 4.35, 4.05  # inches


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
    ranks = [_read(rank, value) for rank, value in enumerate(read_ranks(result))]
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
    full = BARS_LEFT + WIDE + 0.35
    lines = fold(caption, full)
    picture, sheet = open_picture(title, text_table, full, TOP + SIDE + 0.5, lines, lift=0.08)
    write(sheet, LEFT + SIDE / 2, TOP - 0.13, f"keys 0 to {length - 1}", color=QUIET, ha="center")
    style = {"color": QUIET, "ha": "center", "rotation": 90}
    write(sheet, LEFT - 0.13, TOP + SIDE / 2, f"queries 0 to {length - 1}", **style)
    matrix = picture.chart(LEFT, TOP, SIDE, SIDE, "x")
    matrix.set(xlim=(0, length), ylim=(length, 0), xticks=[], yticks=[])
    matrix.spines[["top", "right"]].set(visible=True, color=QUIET, linewidth=0.8)
    for rank, done in enumerate(ranks):
        for block in done:
            _draw(matrix, rank, block, causal and block.queries == block.keys)
    _draw_work(picture, sheet, work, max(length**2 / len(ranks), _duration(work)))
    return picture


def _read(rank: int, value: Any) -> list[Block]:
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


def _duration(work: Sequence[Sequence[int]]) -> int:
    return sum(map(max, zip(*work, strict=True)))


def _draw(ax, rank: int, block: Block, masked: bool) -> None:
    fill, (x, y) = rank_color(rank), (block.keys.start, block.queries.start)
    wide, tall = len(block.keys), len(block.queries)
    style = {"edgecolor": PAPER, "linewidth": 0.8}
    ax.broken_barh([(x, wide)], (y, tall), facecolor=fill, **style)
    if masked:
        corners = [(x, y), (x + wide, y), (x + wide, y + tall)]
        ax.add_patch(Polygon(corners, facecolor=PAPER, alpha=0.65, edgecolor="none", zorder=2))
    place = (x + wide * (0.32 if masked else 0.5), y + tall * (0.68 if masked else 0.5))
    style = {"color": text_color(fill), "ha": "center", "zorder": 3}
    write(ax, *place, str(block.step), 8.5, **style)


def _draw_work(picture: Picture, sheet, work: Sequence[Sequence[int]], most: float) -> None:
    """Draw the work of each rank along time: each step lasts as long as the longest."""
    n = len(work)
    ax = picture.chart(BARS_LEFT, TOP, WIDE, SIDE, "x", "pairs, one after the other")
    ax.set(xlim=(0, 1.02 * most), ylim=(n, 0), yticks=[])  # shows a line at the end, too
    start = 0
    for step, pairs in enumerate(zip(*work, strict=True)):
        for rank, count in enumerate(pairs):
            bar = (rank + 0.22, 0.56)
            style = {"edgecolor": PAPER, "linewidth": 0.8}
            ax.broken_barh([(start, max(pairs))], bar, facecolor=NO_CALL, **style)
            ax.broken_barh([(start, count)], bar, facecolor=rank_color(rank), **style)
            if count:
                style = {"color": text_color(rank_color(rank)), "ha": "center"}
                write(ax, start + count / 2, rank + 0.5, str(step), 8.5, **style)
        start += max(pairs)
    ax.axvline(start, color=QUIET, linewidth=0.8, linestyle=(0, (3, 2)))
    for rank in range(n):
        y = TOP + SIDE * (rank + 0.5) / n
        chip(sheet, BARS_LEFT - 0.72, y - 0.11, 0.58, 0.22, rank, f"rank {rank}")
