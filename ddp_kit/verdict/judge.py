"""Whether the boards of a run's ranks show that it can never end, or that the ranks disagree.

`pool.deadlock_watch` decides when to ask, and drops the answer if a thread that is on no board
may still act. `pool.run_loop` adds what the ranks raised, and raises the error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ddp_kit.error_text import Wait, name_ranks
from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.trace import Snapshot
from ddp_kit.trace.events import Event
from ddp_kit.verdict.explanation import dropped_on, explain, explain_blocked, format_operation
from ddp_kit.verdict.graph import RankState, blocked, stuck
from ddp_kit.verdict.mismatches import half_created, mismatch, mismatch_of


def judge(
    snapshots: Sequence[Snapshot],
    returned: Collection[int],
    over: bool = False,
    long: bool = False,
) -> DeadlockError | MismatchError | None:
    """Return the error of a run that can never end, or whose ranks disagree; None otherwise.

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
    error = deadlock(states) or (_blocked(snapshots, states) if long else None)
    # Stuck ranks may be stuck because of something earlier. If none is stuck, a rank may still
    # be held up by the call in which it waits, and only that call counts.
    waits = [event for each in snapshots for event in each.waits]
    return mismatch_of(snapshots, waits if error is None else None) or error


def ends_by_its_limit(
    snapshots: Sequence[Snapshot], returned: Collection[int]
) -> DeadlockError | None:
    """Return why waits with a time limit can end in no other way; None if they can.

    It is no deadlock: a rank may handle the exception and go on. `judge` has found none.
    """
    if any(snapshot.is_crowded or snapshot.is_renumbered for snapshot in snapshots):
        return None
    if all(each.waits_forever or not each.waits for each in snapshots):
        return None
    states = [RankState.from_snapshot(s, s.rank in returned, limits=False) for s in snapshots]
    error = deadlock(states, forever=False)
    if not isinstance(error, DeadlockError):
        return None
    limited = [w.rank for w in error.waits if not snapshots[w.rank].waits_forever]
    ends = f"the wait of {name_ranks(limited)} ends by its own time limit"
    if len(limited) > 1:  # the other waits may then end in another way
        ends = f"one of the waits of {name_ranks(limited)} must reach its time limit first"
    return DeadlockError(f"{error.fact}; {ends}", error.waits, error.hint, error.returned)


def _events(snapshots: Sequence[Snapshot]) -> list[Event]:
    return [event for snapshot in snapshots for event in snapshot.events]


def deadlock(
    states: Sequence[RankState], forever: bool = True
) -> DeadlockError | MismatchError | None:
    """Return the error of ranks that can never continue; None if every rank still could.

    forever: no time limit ends their waits.
    Stuck ranks that wait in collectives that disagree get a MismatchError, which comes first.
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
    returned = [state.rank for state in states if state.status == "returned"]
    shown = [_wait(event, waits[rank], list(at)) for rank, event in events.items()]
    peers = ((event, at[peer]) for rank, event in events.items() for peer in waits[rank])
    dropped = [one for event, peer in peers for one in dropped_on(peer, event)]
    return DeadlockError(fact, shown, hint, returned, _never_waited_for(dropped))


SMALL = 1 << 20  # bytes of a message that arrives while nothing moves for long


def _blocked(snapshots: Sequence[Snapshot], states: Sequence[RankState]) -> DeadlockError | None:
    """Return the error of ranks between which nothing passes any more; None if there are none."""
    waits = blocked(states)
    in_flight = (event for event in _events(snapshots) if event.end is None) if waits else ()
    if not waits or any(event.nbytes > SMALL for event in in_flight):
        return None  # a large message takes its time
    at = {state.rank: state for state in states}
    rank = min(waits)
    fact, hint = explain_blocked(at, rank, waits[rank][0])
    returned = [state.rank for state in states if state.status == "returned"]
    shown = [_wait(event, (), list(at)) for r in waits if (event := at[r].waits_for)]
    dropped = [event for lost in waits.values() for event in lost]
    return DeadlockError(fact, shown, hint, returned, _never_waited_for(dropped))


def _never_waited_for(events: Iterable[Event]) -> set[Wait]:
    return {Wait(event.rank, event.call, event.where) for event in events}


def _wait(event: Event, peers: tuple[int, ...], world: list[int]) -> Wait:
    # For new_group, the "tensors" are the ranks of the new group; a barrier has none.
    has_tensors = event.kind in ("send", "recv") or event.nbytes or event.inputs or event.outputs
    nbytes = event.nbytes if has_tensors and event.method != "new_group" else None
    operation = format_operation(event, world)
    return Wait(event.rank, operation, event.where, peers, event.tag, nbytes)
