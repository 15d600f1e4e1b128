"""The numbers behind a timeline as text: its steps, or what each rank did in all or in time."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

from ddp_kit.plot.picture import table
from ddp_kit.plot.style import TIMES, significant
from ddp_kit.plot.timeline_lanes import Lanes, absent, short_name, unmatched
from ddp_kit.plot.timeline_panel import MOST_STEPS
from ddp_kit.trace import Trace
from ddp_kit.trace.events import Event
from ddp_kit.trace.schedule import START, WAIT, Action

LASTS = "\N{HORIZONTAL ELLIPSIS}"  # in the steps after the one in which a call began


class _Item(NamedTuple):
    """What one rank does in one step; began: in an earlier one."""

    text: str
    began: bool = False


def step_table(title: str, trace: Trace, lanes: Lanes, window: tuple[float, float]) -> str:
    """Return what happened in a part of the order: one row per step, one column per rank."""
    never = unmatched(trace)
    without = {
        (rank, event.index): f" (without {', '.join(map(str, missing))})"
        for members in trace.collectives
        if (missing := absent(trace, members))
        for rank, event in members.items()
    }

    def name(event: Event) -> str:
        key = event.rank, event.index
        peer = "any" if event.peer is None else event.peer
        text = short_name(event)
        text += {"send": f" → {peer}", "recv": f" ← {peer}"}.get(event.kind, "")
        return text + (f" ({never[key]})" if key in never else without.get(key, ""))

    length = round(lanes.limits[1] - 0.5)
    rows: list[list[list[_Item]]] = [[[] for _ in lanes.plan.actions] for _ in range(length)]
    for rank, own in enumerate(lanes.plan.actions):
        last = 0
        for action in own:
            text = "wait" if action.what == WAIT else name(action.event)
            shown = _steps(action, last, length)
            for step in shown:
                rows[step][rank].append(_Item(text, step > shown[0]))
            last = shown[-1]
    first = round(window[0] - 0.5)
    lines = [
        [str(step - first + 1), *(_cell(items, step == first) for items in rows[step])]
        for step in range(first, round(window[1] - 0.5))
    ]
    header = ["step", *(f"rank {rank}" for rank in range(trace.world_size))]
    if len(lines) > MOST_STEPS:
        lines = _join_equal(lines)
    return table(title, header, lines, align="<")


def _steps(action: Action, last: int, length: int) -> range:
    """Return the steps in which an action is shown; last: the latest with one before it."""
    begin, end = action.begin, action.end
    if action.what != START and action.event.never_ended:
        end = length
    if action.what == WAIT and end == begin:  # it ends the step that its rank has come from
        begin = max(last, begin - 1)
    return range(begin, max(end, begin + 1))


def _cell(items: list[_Item], is_first: bool) -> str:
    texts = [LASTS if item.began and not is_first else item.text for item in items]
    same = ((text, len(list(group))) for text, group in itertools.groupby(texts))
    return ", ".join(f"{text} {TIMES} {many}" if many > 1 else text for text, many in same)


def _join_equal(lines: list[list[str]]) -> list[list[str]]:
    """Return one row for rows that follow each other and differ only in their first column."""
    joined = []
    for _, group in itertools.groupby(lines, key=lambda line: line[1:]):
        same = list(group)
        name = same[0][0] if len(same) == 1 else f"{same[0][0]} to {same[-1][0]}"
        joined.append([name, *same[0][1:]])
    return joined


def rank_table(title: str, trace: Trace, lanes: Lanes) -> str:
    """Return the table of a long trace: one row per rank."""
    counts = Counter((event.rank, event.kind) for event in trace)
    never = Counter((rank, mark) for (rank, _), mark in unmatched(trace).items())
    waited: Counter[int] = Counter()
    for bar in lanes.bars:
        waited[bar.rank] += round(bar.end - bar.begin - 1)  # the last one carries it out
    sent: Counter[int] = Counter()
    for message in trace.messages():
        sent[message.src] += message.nbytes
    header = ["", "sends", "bytes sent", "receives", "collectives", "steps waited"]
    found = [m for m in ("never received", "never sent") if any(m == k for _, k in never)]
    rows = [
        [
            f"rank {rank}",
            f"{counts[rank, 'send']:,}",
            f"{sent[rank]:,}",
            f"{counts[rank, 'recv']:,}",
            f"{counts[rank, 'collective']:,}",
            f"{waited[rank]:,}",
            *(f"{never[rank, mark]:,}" for mark in found),
        ]
        for rank in range(trace.world_size)
    ]
    return table(title, [*header, *found], rows)


def time_table(title: str, lanes: Lanes) -> str:
    """Return the table of the timed form: milliseconds of each rank."""
    spent: Counter[tuple[int, str]] = Counter()
    for bar in lanes.bars:
        spent[bar.rank, bar.kind] += bar.end - bar.begin
    rows = []
    for rank, (begin, end) in enumerate(lanes.spans):
        waits = [spent[rank, kind] for kind in ("send", "recv", "collective")]
        rest = max(0.0, end - begin - sum(waits))
        rows.append([f"rank {rank}", *map(significant, (rest, *waits, end - begin))])
    header = ["", "not in a call", "in sends", "in receives", "in collectives", "all"]
    return table(f"{title} (ms)", header, rows)
