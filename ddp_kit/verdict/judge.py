"""Temporary."""

from __future__ import annotations

from ddp_kit.trace import join
from ddp_kit.verdict.agreement import plainly_agree
from ddp_kit.verdict.deadlocks import deadlock
from ddp_kit.verdict.mismatches import mismatch
from ddp_kit.verdict.state import RankState


def judge(snapshots, returned, over=False):
    if over:
        return None if plainly_agree(snapshots) else mismatch(join(snapshots).events)
    if any(s.is_crowded for s in snapshots):
        return None
    error = deadlock([_state(s, s.rank in returned) for s in snapshots])
    if not plainly_agree(snapshots):
        events = join(snapshots).events
        waited = {event.match_key for r in snapshots if (event := r.waiting)}
        wrong = mismatch(e for e in events if error is not None or e.match_key in waited)
        error = wrong or error
    return error


def _state(snapshot, returned):
    waits_for = snapshot.waiting if snapshot.waits_for_ever else None
    status = "returned" if returned else "waiting" if waits_for else "running"
    state = RankState(snapshot.rank, status, waits_for, {}, {}, {}, {}, {})
    for (kind, peer, tag, group), (posted, given_up) in snapshot.counts().items():
        if kind == "send":
            state.sends[snapshot.rank, peer, tag, group] = posted - given_up
            state.given_up[snapshot.rank, peer, tag, group] = given_up
        elif kind == "recv":
            state.recvs[peer, snapshot.rank, tag, group] = posted - given_up
        elif kind == "any":
            state.any_source[tag, group] = posted - given_up
        else:
            state.collectives[group] = posted - given_up
    return state
