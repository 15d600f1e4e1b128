"""The training steps of a run, found from its events: what every rank calls again and again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ddp_kit.trace.events import Event, Trace

LONGEST = 1000  # calls in a step; to look for longer ones takes too long
BUCKET = "DDP all_reduce"
_REBUILD = "DDP forward"  # called once, before the second forward: it is in no step's pattern


@dataclass(frozen=True)
class TrainingStep:
    """One training step of one rank.

    events: what it called, in this order.
    begin: when the call before the step was complete, so that the step includes its forward; or
        when the worker began.
    end: when the last of `events` was complete. Both are nanoseconds of the monotonic clock.
    """

    rank: int
    events: tuple[Event, ...]
    begin: int
    end: int


def training_steps(trace: Trace) -> dict[int, list[TrainingStep]]:
    """Return the training steps of each rank, in order: {rank: steps}.

    A step is the shortest sequence of calls that a rank repeats, from the same lines and with the
    same shapes, at least three times. Other calls may be between two steps, such as the average
    loss of an epoch, but none from the lines of the step itself. If several loops qualify, it is
    the one that sends most; or its part, if that sends more than half as much.

    With DistributedDataParallel, a step ends with a backward: DDP waits for the last bucket of each
    backward only, so its backwards are known, and two are enough. The first one has other buckets.

    What a rank called before its first step, between steps and after the last one is in no step.
    Neither is a step that was not completed.
    All ranks have equally many steps, or none: the number of a step is the same on all of them. A
    run that was stopped, or whose oldest events were dropped, has the steps that all ranks have.
    """
    events: dict[int, list[Event]] = {rank: [] for rank in range(trace.world_size)}
    for event in sorted(trace, key=lambda event: event.index):
        events[event.rank].append(event)
    cut = {rank for rank, dropped in enumerate(trace.dropped) if dropped}
    found = {rank: _find_steps(own, rank in cut) for rank, own in events.items()}
    counts = {len(steps) for rank, steps in found.items() if events[rank]}
    fewest = min(counts, default=0)
    cut_short = cut or any(event.never_ended for event in trace)
    if not fewest or (len(counts) > 1 and not cut_short):
        return {rank: [] for rank in found}
    whole = {}
    for rank, steps in found.items():
        kept = steps[-fewest:] if cut else steps[:fewest]
        began = trace.spans[rank][0] if rank < len(trace.spans) else None
        whole[rank] = list(_as_steps(events[rank], kept, began))
    return whole


def _moment(event: Event) -> int:
    """Return when an event was complete, as far as is known."""
    return max(event.start, event.waited or 0, event.end or 0)


def _as_steps(
    events: Sequence[Event], ranges: Sequence[range], began: int | None
) -> Iterator[TrainingStep]:
    """Yield the steps of a rank. ranges: the places of each step in `events`."""
    over = list(accumulate(map(_moment, events), max))
    for places in ranges:
        own = tuple(events[places.start : places.stop])
        before = over[places.start - 1] if places.start else began
        begin = own[0].start if before is None else min(before, own[0].start)
        yield TrainingStep(own[0].rank, own, begin, max(map(_moment, own)))


@dataclass(frozen=True)
class _Call:
    """One call of a rank, or all the buckets of a backward of DDP, which count as one.

    what: equal for calls that repeat each other. line: equal for those from the same line.
    places: of its events, among those of the rank.
    """

    what: Hashable
    line: Hashable
    places: Sequence[int]
    is_backward: bool
    nbytes: int


def _find_steps(events: Sequence[Event], is_cut: bool) -> list[range]:
    """Return the places of each step in the events of a rank. is_cut: its oldest ones are lost."""
    calls = _calls(events, is_cut)
    starts, period = _find_repeats(calls)
    steps = []
    for start in starts:
        places = [place for call in calls[start : start + period] for place in call.places]
        steps.append(range(min(places), max(places) + 1))
    return steps


def _calls(events: Sequence[Event], is_cut: bool) -> list[_Call]:
    backwards = _backwards(events)
    last_of = {places[-1]: places for places in backwards}
    inside = {place for places in backwards for place in places[:-1]}
    calls = []
    for place, event in enumerate(events):
        if place in inside or event.op == _REBUILD:
            continue
        places = last_of.get(place, [place])
        what, line = _identify(event), (event.op, event.group, event.where)
        if place in last_of:
            what = line
        if event.never_ended or (is_cut and backwards and places is backwards[0]):
            what = "incomplete", place
        nbytes = sum(max(1, events[each].nbytes) for each in places)
        calls.append(_Call(what, line, places, place in last_of, nbytes))
    return calls


def _identify(event: Event) -> Hashable:
    """Return what a repetition of an event has in common with it."""
    to = event.op, event.group, event.peer, event.tag, event.root, event.reduce_op
    return to, event.dtype, event.inputs, event.outputs, event.splits, event.where


def _backwards(events: Sequence[Event]) -> list[list[int]]:
    """Return the places of the buckets of each backward of DDP; [] if they cannot be told apart.

    A learner's hook may wait for every bucket. Then these are no backwards, and they differ.
    """
    found: list[list[int]] = [[]]
    for place, event in enumerate(events):
        if event.op == BUCKET:
            found[-1].append(place)
            if event.end is not None and event.waited is not None:
                found.append([])
    found.pop()  # what is left belongs to a backward that was not completed
    by_line = defaultdict(list)
    for places in found:
        last = events[places[-1]]
        by_line[last.group, last.where].append([_identify(events[place]) for place in places])
    alike = all(buckets == same[1] for same in by_line.values() for buckets in same[1:])
    return found if alike else []


def _find_repeats(calls: Sequence[_Call]) -> tuple[list[int], int]:
    """Return where each repetition of the steps' calls starts, and how many calls it has."""
    with_ddp = any(call.is_backward for call in calls)
    fewest = 2 if with_ddp else 3
    numbers: dict[Hashable, int] = {}
    values = "".join(chr(numbers.setdefault(call.what, len(numbers))) for call in calls)
    total = [0, *accumulate(call.nbytes for call in calls)]
    found: list[tuple[int, list[int], int]] = []  # bytes, starts, period
    seen: set[str] = set()
    for period in range(1, min(len(calls) // fewest, LONGEST) + 1):
        for run in re.finditer(rf"(.{{{period}}})\1{{{fewest - 1},}}", values, re.DOTALL):
            part = run[1]
            if part in seen or part in (part + part)[1:-1]:  # it repeats a shorter one
                continue
            seen.add(part)
            starts = [place.start() for place in re.finditer(re.escape(part), values)]
            if len(starts) >= fewest and _is_whole(calls, starts, period, with_ddp):
                nbytes = sum(total[start + period] - total[start] for start in starts)
                found.append((nbytes, starts, period))
    most = max((nbytes for nbytes, _, _ in found), default=0)
    return next(
        ((starts, period) for nbytes, starts, period in found if 2 * nbytes > most), ([], 0)
    )


def _is_whole(calls: Sequence[_Call], starts: Sequence[int], period: int, with_ddp: bool) -> bool:
    """Return whether between the first and the last step no call of a step's line is left over.

    Otherwise it is a part of a step, such as the layers of equal shape. with_ddp: a step has a
    backward, and only backwards may not be left over.
    """
    lines = {
        call.line
        for call in calls[starts[0] : starts[0] + period]
        if call.is_backward or not with_ddp
    }
    between = (
        call for start, following in pairwise(starts) for call in calls[start + period : following]
    )
    return bool(lines) and all(call.line not in lines for call in between)
