"""The verdict on ranks that can never go on."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.failures import Wait
from ddp_kit.trace.events import Event
from ddp_kit.verdict.explanation import explain
from ddp_kit.verdict.graph import stuck
from ddp_kit.verdict.mismatches import mismatch
from ddp_kit.verdict.state import RankState
from ddp_kit.verdict.words import called


def deadlock(states: Sequence[RankState]) -> DeadlockError | MismatchError | None:
    """Return the verdict on ranks that can never go on; None while all of them could.

    Stuck ranks that do not even agree in what they wait in have a mismatch, which comes first.
    """
    waits = stuck(states)
    if not waits:
        return None
    at = {state.rank: state for state in states}
    events = {rank: event for rank in waits if (event := at[rank].waits_for) is not None}
    wrong = mismatch(event for event in events.values() if event.kind == "collective")
    if wrong is not None:
        return wrong
    fact, hint = explain(states, waits)
    returned = [state.rank for state in states if state.status == "returned"]
    told = [_wait(event, waits[rank], list(at)) for rank, event in events.items()]
    return DeadlockError(fact, told, hint, returned)


def _wait(event: Event, peers: tuple[int, ...], world: list[int]) -> Wait:
    gives = event.kind != "collective" or event.nbytes or event.inputs or event.outputs
    nbytes = event.nbytes if gives else None
    if event.method == "new_group":
        nbytes = None
    return Wait(event.rank, called(event, world), event.where, peers, event.tag, nbytes)
