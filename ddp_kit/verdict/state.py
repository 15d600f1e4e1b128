"""The state of each rank of a run, as plain data: the input of every verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_kit.trace import Snapshot
from ddp_kit.trace.events import Event, Group

Channel = tuple[int, int, int, Group]  # src, dst, tag, group; src and dst are global ranks


@dataclass(frozen=True)
class RankState:
    """What one rank is doing, and how many operations it has posted.

    An operation is posted once it is called, complete or not. Operations that the rank gave up
    (their work object was dropped before anybody waited for it) do not count as posted.
    """

    rank: int
    status: str  # "running": it may do anything; "waiting"; "returned": it will do nothing more
    waits_for: Event | None = None  # the operation that must complete before it can continue
    sends: dict[Channel, int] = field(default_factory=dict)
    recvs: dict[Channel, int] = field(default_factory=dict)  # from any source: once complete
    any_source: dict[tuple[int, Group], int] = field(default_factory=dict)  # (tag, group): open
    collectives: dict[Group, int] = field(default_factory=dict)
    given_up: dict[Channel, int] = field(default_factory=dict)  # sends; only explanations use it

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, returned: bool) -> RankState:
        """Return the state of the rank whose board was copied. returned: its worker has."""
        rank = snapshot.rank
        waits_for = snapshot.waiting if snapshot.waits_forever else None
        status = "returned" if returned else "waiting" if waits_for else "running"
        state = cls(rank, status, waits_for)
        for (kind, peer, tag, group), (started, given_up) in snapshot.counts().items():
            posted = started - given_up
            if kind == "send":
                state.sends[rank, peer, tag, group] = posted
                state.given_up[rank, peer, tag, group] = given_up
            elif kind == "recv":
                state.recvs[peer, rank, tag, group] = posted
            elif kind == "any":
                state.any_source[tag, group] = posted
            else:
                state.collectives[group] = posted
        return state
