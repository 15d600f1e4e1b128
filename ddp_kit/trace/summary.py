"""What the ranks of a run called, sent and waited for: a table by rank and kind of call."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ddp_kit.error_text import count, name_ranks
from ddp_kit.errors import TraceError
from ddp_kit.trace.collectives import bytes_sent, formula
from ddp_kit.trace.events import Event, Trace
from ddp_kit.trace.training_steps import BUCKET, TrainingStep, training_steps

Interval = tuple[int, int]  # begin and end in nanoseconds


@dataclass(frozen=True)
class Row:
    """All calls of one kind that one rank made.

    The first fields are the same on every run of a deterministic program; the last three are times.

    call: as in "DDP all_reduce", with the ranks of its group if these are not all.
    calls: how many. calls_in_step: in the last training step; 0 without steps.
    nbytes: of the tensors passed to them. sent: how many of these the rank sends to others, by
        `formula`. sent_in_step: in the last training step.
    formula: the algorithm, and what a rank sends by it; see `ddp_kit.trace.collectives`.
    waiting: seconds that the rank waited in these calls. On a GPU with nccl, a wait is short: it
        does not last until the operation is complete.
    hidden: seconds for which one of them was on its way while the rank computed: for an
        asynchronous call, until its wait begins; for a bucket of DDP, until the last gradient is
        computed. 0 if the calls themselves wait.
    share: of the rank's training steps, which part it waited in these calls; without steps, of
        its whole run. None if that is not known.
    """

    rank: int
    call: str
    calls: int
    calls_in_step: int
    nbytes: int
    sent: int
    sent_in_step: int
    formula: str
    waiting: float
    hidden: float
    share: float | None


@dataclass(frozen=True, repr=False)
class Summary:
    """A table of the calls of a run, as text and as HTML.

    rows: by kind of call, and then by rank.
    steps: how many training steps each rank ran; 0 if none were found.
    timed: whether the text has times. Without them, it is the same on every run.
    """

    rows: tuple[Row, ...]
    steps: int
    timed: bool
    heading: str
    notes: tuple[str, ...]

    def _table(self) -> list[list[str]]:
        """Return the header and the rows. Untimed, ranks with equal rows share one."""
        shown: dict[tuple, list[Row]] = {}
        for row in self.rows:
            shown.setdefault((*_cells(row, self.steps), self.timed and row.rank), []).append(row)
        per_step = bool(self.steps)
        header = ["call", "ranks", "calls", *["calls/step"] * per_step]
        header += ["bytes", "sent", *["sent/step"] * per_step]
        times = ["waiting (ms)", "hidden (ms)", f"of {'steps' if self.steps else 'the run'}"]
        lines = [header + (times if self.timed else []) + ["formula"]]
        for (call, *numbers, algorithm, _), rows in shown.items():
            cells = [call, _name(row.rank for row in rows), *numbers]
            lines.append([*cells, *(_times(rows[0]) if self.timed else []), algorithm])
        return lines

    def __str__(self) -> str:
        if not self.rows:
            return "\n".join([self.heading, *self.notes])
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        left = (0, len(widths) - 1)
        lines = [
            "  ".join(
                cell.ljust(width) if place in left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        return "\n".join([self.heading, "", *lines, "", *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head, *lines = self._table() if self.rows else [[]]
        parts = [f"<p>{html.escape(self.heading)}</p>"]
        if lines:
            parts.append("<table><thead>" + _line(head, "th") + "</thead><tbody>")
            parts += [_line(line, "td") for line in lines]
            parts.append("</tbody></table>")
        parts += [f"<p>{html.escape(note)}</p>" for note in self.notes]
        return "\n".join(parts)


def summarize(trace: Trace, timed: bool, rank: int | None) -> Summary:
    """Return the summary of a trace; see `Trace.summary`."""
    if not isinstance(timed, bool):
        raise TraceError(f"timed must be True or False, got {timed!r}")
    found = training_steps(trace)
    ranks = range(trace.world_size) if rank is None else [rank]
    by_kind: dict[tuple[str, str], list[Row]] = {}
    for each in ranks:
        events = [event for event in trace if event.rank == each]
        span = trace.spans[each] if each < len(trace.spans) else None
        for row in _rows(trace, events, found[each], span):
            by_kind.setdefault((row.call, row.formula), []).append(row)
    rows = tuple(row for kind in by_kind.values() for row in kind)
    steps = {each: found[each] for each in ranks if found[each]}
    notes = _notes(trace, ranks, rows, timed, steps)
    heading = _heading(trace, rank, rows, steps)
    return Summary(rows, max(map(len, steps.values()), default=0), timed, heading, notes)


def _rows(
    trace: Trace, events: Sequence[Event], steps: Sequence[TrainingStep], span: Interval | None
) -> list[Row]:
    kinds: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        # The parts of a call such as scatter_object_list are sent in different ways.
        kind = _name_call(event, trace.world_size), formula(event)
        kinds.setdefault(kind, []).append(event)
    busy = [each for event in events for each in _not_computing(event)]
    in_last = {event.index for event in steps[-1].events} if steps else set()
    in_steps = {event.index for step in steps for event in step.events}
    whole = sum(step.end - step.begin for step in steps)
    if not steps and span is not None:
        whole = span[1] - span[0]
    rows = []
    for (call, algorithm), own in kinds.items():
        last = [event for event in own if event.index in in_last]
        flights = [(event.start, event.end) for event in own if event.end is not None]
        counted = [event for event in own if not steps or event.index in in_steps]
        rows.append(
            Row(
                events[0].rank,
                call,
                len(own),
                len(last),
                sum(event.nbytes for event in own),
                round(sum(map(bytes_sent, own))),
                round(sum(map(bytes_sent, last))),
                algorithm,
                _covered(wait for event in own for wait in _wait(event)) / 1e9,
                (_covered([*flights, *busy]) - _covered(busy)) / 1e9,
                _covered(wait for event in counted for wait in _wait(event)) / whole
                if whole
                else None,
            )
        )
    return rows


def _name_call(event: Event, world_size: int) -> str:
    ranks = event.group.ranks
    return event.op if len(ranks) in (0, world_size) else f"{event.op} in {name_ranks(ranks)}"


def _wait(event: Event) -> list[Interval]:
    done = event.waited is not None and event.end is not None
    return [(event.waited, event.end)] if done else []


def _not_computing(event: Event) -> list[Interval]:
    """Return when the rank did not compute: also before its wait, if the call itself waited.

    DDP waits for the last bucket, which it sends when all gradients are computed.
    """
    at_once = event.blocking or event.op == BUCKET
    return [(event.start if at_once else begin, end) for begin, end in _wait(event)]


def _covered(intervals: Iterable[Interval]) -> int:
    """Return the nanoseconds that lie in at least one of the intervals."""
    covered, over = 0, 0
    for begin, end in sorted(intervals):
        covered += max(0, end - max(begin, over))
        over = max(over, end)
    return covered


# --- text ----------------------------------------------------------------------------------


def _cells(row: Row, steps: int) -> tuple[str, ...]:
    calls = [row.calls, *[row.calls_in_step] * bool(steps)]
    sent = [row.nbytes, row.sent, *[row.sent_in_step] * bool(steps)]
    return (row.call, *(f"{number:,}" for number in calls + sent), row.formula)


def _times(row: Row) -> list[str]:
    share = "" if row.share is None else f"{row.share:.1%}"
    return [f"{1e3 * row.waiting:,.2f}", f"{1e3 * row.hidden:,.2f}", share]


def _name(ranks: Iterable[int]) -> str:
    """Return ranks in short: "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _line(cells: Sequence[str], tag: str) -> str:
    sides = ["left", *["right"] * (len(cells) - 2), "left"]
    shown = (
        f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _heading(
    trace: Trace, rank: int | None, rows: Sequence[Row], steps: dict[int, list[TrainingStep]]
) -> str:
    who = count(trace.world_size, "rank") if rank is None else f"rank {rank}"
    if not rows:
        return f"{who}: nothing sent"
    if not steps:
        return who
    many = len(next(iter(steps.values())))
    last = {len(own[-1].events) for own in steps.values()}
    first = {len(own[0].events) for own in steps.values()}
    except_first = "" if first == last else f", except {_few(first)} in the first"
    return f"{who}, {many:,} steps of {_few(last)}{except_first}"


def _few(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return count(high, "call") if low == high else f"{low:,} to {high:,} calls"


def _notes(
    trace: Trace,
    ranks: Iterable[int],
    rows: Sequence[Row],
    timed: bool,
    steps: dict[int, list[TrainingStep]],
) -> tuple[str, ...]:
    notes = []
    if timed and steps:
        middle = [median(step.end - step.begin for step in own) / 1e6 for own in steps.values()]
        low, high = (f"{time:,.2f}" for time in (min(middle), max(middle)))
        spread = low if low == high else f"{low} to {high}"
        notes.append(f"A step takes {spread} ms, the median of each rank.")
    if rows:
        notes += [
            "sent: what a rank sends by the formula, with the bytes of its tensors and n ranks.",
            "A backend may use another algorithm.",
        ]
    cut = {rank: trace.dropped[rank] for rank in ranks if rank < len(trace.dropped)}
    if any(cut.values()):
        whom = name_ranks(rank for rank, dropped in cut.items() if dropped)
        notes.append(f"Not counted: {count(sum(cut.values()), 'older call')} of {whom}.")
    return tuple(notes)
