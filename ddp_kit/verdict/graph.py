"""The wait-for graph: what each rank waits for, and which ranks can therefore never continue.

It has two kinds of nodes, as in MUST: most waits need all the ranks that they name (AND), a
receive from any source and a wait for a key of a store need one of them (OR). A rank is live if it
runs, if what it waits for has already happened, or if live ranks could still make it happen. All
other ranks are stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    others: tuple[Event, ...] = ()  # of its other threads: it can go on after any of these, too

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, returned: bool, limits: bool = True) -> RankState:
        """Return the state of the rank whose board was copied. returned: its worker has.

        limits: time limits of waits count, so a rank whose wait has one may do anything.
        """
        rank = snapshot.rank
        waits = snapshot.waits if snapshot.waits_forever or not limits else ()
        status = "returned" if returned else "waiting" if waits else "running"
        state = cls(rank, status, waits[0] if waits else None, others=waits[1:])
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


def stuck(states: Sequence[RankState]) -> dict[int, tuple[int, ...]]:
    """Return the waiting ranks that can never continue, each with the ranks that it waits for.

    A slow rank is not stuck: whatever could still happen counts as if it did.
    """
    at = {state.rank: state for state in states}
    waiting = {
        rank: ways
        for rank in sorted(at)
        if (ways := [(way, _needs(way, at)) for way in _ways(at[rank])])
        and all(peers is not None for _, peers in ways)
    }
    # A rank without a state may do anything, so it is never dead.
    dead = {rank for rank in at if rank in waiting or at[rank].status == "returned"}
    freed = True
    while freed:
        freed = {
            rank
            for rank, ways in waiting.items()
            if rank in dead and any(_can_go(way, peers, dead) for way, peers in ways)
        }
        dead -= freed
    # The loop frees a rank in a rooted collective whose root has joined, because that rank may
    # leave before the others join. If none of the others can ever join, it does not leave.
    dead |= {
        rank
        for rank, ways in waiting.items()
        if all(peers and dead.issuperset(peers) for _, peers in ways)
    }
    return {rank: ways[0][1] for rank, ways in waiting.items() if rank in dead}


def _ways(state: RankState) -> list[RankState]:
    """Return a state for each way in which a waiting rank may go on: one for each wait."""
    if state.status != "waiting" or state.waits_for is None:
        return []
    return [
        replace(state, waits_for=event, others=()) for event in (state.waits_for, *state.others)
    ]


def _can_go(state: RankState, peers: tuple[int, ...], dead: set[int]) -> bool:
    """Return whether ranks that are not dead could complete what this one waits for."""
    event = state.waits_for
    assert event is not None
    if event.root not in (None, state.rank, *peers):
        return True  # the root has joined: a rank may leave before the others join
    # Which ranks the root needs depends on the backend's tree: one that can still join is enough.
    enough = any if one_is_enough(event) or event.root is not None else all
    return enough(peer not in dead for peer in peers)


def from_any_source(event: Event) -> bool:
    """Return whether this is a receive that accepts a message from any rank."""
    return event.kind == "recv" and event.peer is None


def one_is_enough(event: Event) -> bool:
    """Return whether any one of the ranks that this waits for can complete it."""
    return event.kind == "key" or from_any_source(event)


def _needs(state: RankState, at: Mapping[int, RankState]) -> tuple[int, ...] | None:
    """Return the ranks that must act before this one can continue; None if it already can."""
    event = state.waits_for
    if state.status != "waiting" or event is None:
        return None
    if event.kind == "collective":
        return tuple(r for r in _others(state, event) if not _has_joined(at.get(r), event)) or None
    if event.kind == "send":
        return None if _has_receive(at.get(event.peer), event) else (event.peer,)
    if event.kind == "key":  # while it waits, nobody has set the key
        return tuple(rank for rank in sorted(at) if rank != state.rank)
    if event.kind != "recv":
        return None
    sources = _others(state, event) if event.peer is None else (event.peer,)
    return None if any(_has_sent(at.get(rank), state, event) for rank in sources) else sources


def _others(state: RankState, event: Event) -> tuple[int, ...]:
    return tuple(rank for rank in event.group.ranks if rank != state.rank)


def _has_joined(state: RankState | None, event: Event) -> bool:
    return state is not None and state.collectives.get(event.group, 0) > event.sequence


def _has_receive(state: RankState | None, event: Event) -> bool:
    return state is not None and (
        state.recvs.get(event.channel, 0) > event.sequence
        or state.any_source.get((event.tag, event.group), 0) > 0
    )


def _has_sent(sender: RankState | None, receiver: RankState, event: Event) -> bool:
    if sender is None:
        return False
    channel = sender.rank, receiver.rank, event.tag, event.group
    # A receive from any source has no sequence number on a channel before it is complete.
    taken = receiver.recvs.get(channel, 0) if event.peer is None else event.sequence
    return sender.sends.get(channel, 0) > taken


def shortest_cycle(peers: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the ranks of the shortest cycle, starting at its lowest rank; [] if there is none."""
    best: list[int] = []
    for start in sorted(peers):
        before: dict[int, int] = {}
        queue = deque([start])
        while queue and start not in before:
            rank = queue.popleft()
            for peer in peers.get(rank, ()):
                if peer not in before and peer >= start:
                    before[peer] = rank
                    queue.append(peer)
        if start in before:
            path = [before[start]]
            while path[-1] != start:
                path.append(before[path[-1]])
            if not best or len(path) < len(best):
                best = path[::-1]
    return best
