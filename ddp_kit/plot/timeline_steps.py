"""A timeline's training steps, of which one is drawn in large, and its numbers as text."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from statistics import median_low

from ddp_kit.errors import PlotError
from ddp_kit.plot.picture import table
from ddp_kit.plot.style import TIMES, significant
from ddp_kit.plot.timeline_lanes import MOST_MARKS, MOST_STEPS, Lanes, absent, short_name, unmatched
from ddp_kit.trace import Trace
from ddp_kit.trace.events import Event
from ddp_kit.trace.schedule import START, WAIT, Action
from ddp_kit.trace.training_steps import TrainingStep, training_steps

FEWEST, MOST_COLLECTIVES = 3, 12  # training steps; what is easy to read without them
LASTS = "\N{HORIZONTAL ELLIPSIS}"  # in the steps after the one in which a call began


@dataclass(frozen=True)
class Training:
    """The training steps of a run on the axis of its timeline.

    steps: of each rank, unless it has none. spans: where each step begins and ends.
    kinds: equal numbers for steps with the same calls. shown: which step is drawn in large; None:
    what came after the last one, because the run never ended. window: where that begins and ends.
    """

    steps: dict[int, list[TrainingStep]]
    spans: list[tuple[float, float]]
    kinds: list[int]
    shown: int | None
    window: tuple[float, float]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The first and the last of all steps in a row that have the same calls."""
        rows = itertools.groupby(range(len(self.kinds)), key=self.kinds.__getitem__)
        return [(row[0], row[-1]) for row in (list(group) for _, group in rows)]

    @property
    def label(self) -> str:
        total = len(self.spans)
        if self.shown is None:
            return f"After training step {total}, the last that was completed"
        alike = self.kinds.count(self.kinds[self.shown])
        text = f"Training step {self.shown + 1:,} of {total:,}"
        if alike == total:
            return f"{text}, which all have the same calls"
        return f"{text}, {f'one of {alike:,}' if alike > 1 else 'the only one'} with these calls"


def find_training(trace: Trace, lanes: Lanes, step: int | None) -> Training | None:
    """Return the training steps that a timeline shows, or None if it shows every event.

    step: which one to show, from 0. None: one with the calls that most steps have; in time, the one
    with the median duration; in a run that never ended, its end. Raises PlotError if there is no
    such step.
    """
    if step is None and len(trace.collectives) <= MOST_COLLECTIVES:
        return None
    steps = {rank: own for rank, own in training_steps(trace).items() if own}
    total = len(next(iter(steps.values()), ()))
    if step is not None:
        if not total:
            raise PlotError(f"step must be None, got {step!r}: no training steps were found")
        if not isinstance(step, int) or not -total <= step < total:
            raise PlotError(
                f"step must be from {-total} to {total - 1}, where 0 is the first training step; "
                f"got {step!r}"
            )
    elif total < FEWEST or not (_are_worth(steps) or _are_most(steps, trace)):
        return None
    numbers: dict[tuple, int] = {}
    kinds = [
        numbers.setdefault(tuple(_calls(own[i]) for own in steps.values()), len(numbers))
        for i in range(total)
    ]
    spans = [_span(lanes, [own[i] for own in steps.values()]) for i in range(total)]
    over = spans[-1][1], lanes.limits[1]
    last = {rank: own[-1].events[-1].index for rank, own in steps.items()}
    stuck = (event for event in trace if event.never_ended)
    if step is None and over[0] < over[1] and any(e.index > last.get(e.rank, -1) for e in stuck):
        return Training(steps, spans, kinds, None, over)
    if step is None:
        most = Counter(kinds).most_common(1)[0][0]
        # The first step may have begun with what a run does only once.
        alike = [i for i in range(1, total) if kinds[i] == most] or [0]
        step = alike[0]
        if lanes.zero is not None:
            lengths = {i: spans[i][1] - spans[i][0] for i in alike}
            middle = median_low(lengths.values())
            step = next(i for i in alike if lengths[i] == middle)
    return Training(steps, spans, kinds, step % total, spans[step])


def _are_worth(steps: dict[int, list[TrainingStep]]) -> bool:
    """Return whether a run is easier to read by its training steps."""
    first = max((own[0].events for own in steps.values()), key=len)
    ops = {event.op for event in first if event.kind == "collective"}
    # A loop of one collective has one name above all its lines, and nothing to enlarge.
    repeats = len(first) > 1 or any(op.startswith("DDP") for op in ops)
    return bool(ops) and repeats


def _are_most(steps: dict[int, list[TrainingStep]], trace: Trace) -> bool:
    """Return whether there are too many events to draw one by one, and most are in steps."""
    inside = sum(len(step.events) for own in steps.values() for step in own)
    return len(trace.collectives) > MOST_MARKS and 2 * inside > len(trace.events)


def _calls(step: TrainingStep) -> tuple:
    return tuple((e.op, e.group, e.peer, e.tag, e.inputs, e.outputs) for e in step.events)


def _span(lanes: Lanes, ranks: list[TrainingStep]) -> tuple[float, float]:
    if lanes.zero is not None:  # when the last rank begins: steps in a row do not overlap
        begin, end = max(step.begin for step in ranks), max(step.end for step in ranks)
        return (begin - lanes.zero) / 1e6, (end - lanes.zero) / 1e6
    at = [lanes.plan.at[event.rank, event.index] for step in ranks for event in step.events]
    return min(at) + 0.5, max(at) + 1.5


# ---- as text


def steps_table(title: str, trace: Trace, training: Training) -> str:
    """Return how many calls each rank made in each training step, before and after them."""
    own, ranks = training.steps, range(trace.world_size)
    other: dict[str, list[int]] = {"before": [], "between": [], "after": []}
    for rank in ranks:
        indices = [event.index for event in trace if event.rank == rank]
        inside = [event.index for step in own.get(rank, ()) for event in step.events]
        first, last = (inside[0], inside[-1]) if inside else (0, math.inf)
        before, after = sum(i < first for i in indices), sum(i > last for i in indices)
        other["before"].append(before)
        other["between"].append(len(indices) - before - after - len(inside) if inside else 0)
        other["after"].append(after)
    rows = {name: [name, *map(str, calls)] for name, calls in other.items() if any(calls)}
    middle = []
    for first, last in training.runs:
        name = str(first + 1) if first == last else f"{first + 1} to {last + 1}, each"
        middle.append([name, *(str(len(own[r][first].events) if r in own else 0) for r in ranks)])
    early = [rows.pop("before")] if "before" in rows else []
    header = ["calls in training step", *(f"rank {rank}" for rank in ranks)]
    return table(title, header, [*early, *middle, *rows.values()])


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
    # By step and rank: each text, and whether that began in an earlier step.
    rows: list[list[list[tuple[str, bool]]]] = [[[] for _ in lanes.spans] for _ in range(length)]
    for rank, own in enumerate(lanes.plan.actions):
        last = 0
        for action in own:
            text = "wait" if action.what == WAIT else name(action.event)
            shown = _steps(action, last, length)
            for step in shown:
                rows[step][rank].append((text, step > shown[0]))
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


def _cell(items: list[tuple[str, bool]], is_first: bool) -> str:
    texts = [LASTS if began and not is_first else text for text, began in items]
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
    rows = []
    for rank in range(trace.world_size):
        sends, recvs, collectives = (counts[rank, k] for k in ("send", "recv", "collective"))
        numbers = [sends, sent[rank], recvs, collectives, waited[rank]]
        numbers += [never[rank, mark] for mark in found]
        rows.append([f"rank {rank}", *(f"{number:,}" for number in numbers)])
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
