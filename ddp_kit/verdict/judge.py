"""Whether the boards of a run's ranks show that it can never end, or that the ranks disagree.

`pool.deadlock_watch` decides when to ask, and drops the answer if a thread that is on no board
may still act. `pool.run_loop` adds what the ranks raised, and raises the error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ddp_kit.error_text import Wait, name_ranks
from ddp_kit.trace import Snapshot
from ddp_kit.trace.events import Event
from ddp_kit.verdict.explanation import (
    Verdict,
    dropped_on,
    explain,
    explain_blocked,
    format_operation,
)
from ddp_kit.verdict.graph import RankState, blocked, stuck
from ddp_kit.verdict.mismatches import half_created, mismatch, mismatch_of


def judge(
    snapshots: Sequence[Snapshot],
    returned: Collection[int],
    over: bool = False,
    long: bool = False,
) -> Verdict | None:
    """Return why a run can never end, or in what its ranks disagree; None if neither is so.

    snapshots: one for each rank. returned: the ranks whose worker has returned. over: every rank
    has returned, raised or ended; if not, nothing has moved for a while, and a disagreement counts
    only if a rank waits because of it.
    """
    if any(snapshot.is_renumbered for snapshot in snapshots):
        return None
    if over:
        everywhere = len(returned) == len(snapshots)
        return mismatch_of(snapshots) or (half_created(snapshots) if everywhere else None)
    if any(snapshot.is_crowded for snapshot in snapshots):
        return None  # not everything was counted
    states = [RankState.from_snapshot(each, each.rank in returned) for each in snapshots]
    verdict = deadlock(states) or (_blocked(snapshots, states) if long else None)
    # Stuck ranks may be stuck because of something earlier. If none is stuck, a rank may still
    # be held up by the call in which it waits, and only that call counts.
    waits = [event for each in snapshots for event in each.waits]
    return mismatch_of(snapshots, waits if verdict is None else None) or verdict


def ends_by_its_limit(snapshots: Sequence[Snapshot], returned: Collection[int]) -> Verdict | None:
    """Return why waits with a time limit can end in no other way; None if they can.

    It is no deadlock: a rank may handle the exception and go on. `judge` has found none.
    """
    if any(snapshot.is_crowded or snapshot.is_renumbered for snapshot in snapshots):
        return None
    if all(each.waits_forever or not each.waits for each in snapshots):
        return None
    states = [RankState.from_snapshot(s, s.rank in returned, limits=False) for s in snapshots]
    verdict = deadlock(states, forever=False)
    if verdict is None or not verdict.waits:
        return None
    limited = [w.rank for w in verdict.waits if not snapshots[w.rank].waits_forever]
    ends = f"the wait of {name_ranks(limited)} ends by its own time limit"
    if len(limited) > 1:  # the other waits may then end in another way
        ends = f"one of the waits of {name_ranks(limited)} must reach its time limit first"
    return replace(verdict, fact=f"{verdict.fact}; {ends}", dropped=())


def deadlock(states: Sequence[RankState], forever: bool = True) -> Verdict | None:
    """Return why ranks can never continue; None if every rank still could.

    forever: no time limit ends their waits. If stuck ranks wait in collectives that disagree, that
    is the verdict.
    """
    waits = stuck(states)
    if not waits:
        return None
    at = {state.rank: state for state in states}
    events = {rank: event for rank in waits if (event := at[rank].waits_for) is not None}
    wrong = mismatch(event for event in events.values() if event.kind == "collective")
    if wrong is not None:
        return wrong
    fact, hint = explain(states, waits, forever)
    shown = [_wait(event, waits[rank], list(at)) for rank, event in events.items()]
    peers = ((event, at[peer]) for rank, event in events.items() for peer in waits[rank])
    dropped = [one for event, peer in peers for one in dropped_on(peer, event)]
    return _stuck(fact, hint, states, shown, dropped)


def _stuck(
    fact: str,
    hint: str,
    states: Sequence[RankState],
    waits: Iterable[Wait],
    dropped: Iterable[Event],
) -> Verdict:
    returned = tuple(state.rank for state in states if state.status == "returned")
    never_waited_for = {Wait(event.rank, event.call, event.where) for event in dropped}
    return Verdict(fact, hint, tuple(waits), returned, tuple(never_waited_for))


SMALL = 1 << 20  # bytes of a message that arrives while nothing moves for long


def _blocked(snapshots: Sequence[Snapshot], states: Sequence[RankState]) -> Verdict | None:
    """Return why nothing passes between ranks any more; None if that is not so."""
    waits = blocked(states)
    if not waits:
        return None
    events = (event for snapshot in snapshots for event in snapshot.events)
    if any(event.nbytes > SMALL for event in events if event.end is None):
        return None  # a large message takes its time
    at = {state.rank: state for state in states}
    rank = min(waits)
    fact, hint = explain_blocked(at, rank, waits[rank][0])
    shown = [_wait(event, (), list(at)) for r in waits if (event := at[r].waits_for)]
    return _stuck(fact, hint, states, shown, [one for lost in waits.values() for one in lost])


def _wait(event: Event, peers: tuple[int, ...], world: list[int]) -> Wait:
    # For new_group, the "tensors" are the ranks of the new group; a barrier has none.
    has_tensors = event.kind in ("send", "recv") or event.nbytes or event.inputs or event.outputs
    nbytes = event.nbytes if has_tensors and event.method != "new_group" else None
    operation = format_operation(event, world)
    return Wait(event.rank, operation, event.where, peers, event.tag, nbytes)
