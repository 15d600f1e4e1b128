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
from math import prod

from ddp_kit.backends import mpi, shm
from ddp_kit.backends.shm.segment import SLOT, SLOTS
from ddp_kit.trace import Snapshot
from ddp_kit.trace.events import Event, Group

Channel = tuple[int, int, int, Group]  # src, dst, tag, group; src and dst are global ranks


@dataclass(frozen=True)
class RankState:
    """What one rank is doing, and how many operations it has posted.

    An operation is posted once it is called, complete or not. A message that a rank gives up (its
    Work is dropped before anybody has waited for it) keeps its place in the channel.
    """

    rank: int
    status: str  # "running": it may do anything; "waiting"; "returned": it will do nothing more
    waits_for: Event | None = None  # the operation that must complete before it can continue
    sends: dict[Channel, int] = field(default_factory=dict)
    recvs: dict[Channel, int] = field(default_factory=dict)  # from any source: once complete
    any_source: dict[tuple[int, Group], int] = field(default_factory=dict)  # (tag, group): open
    collectives: dict[Group, int] = field(default_factory=dict)
    given_up: dict[Channel, dict[int, Event]] = field(default_factory=dict)  # by their sequence
    # Of its threads and callbacks: it can go on after any of these, even if it has returned.
    alternatives: tuple[Event, ...] = ()

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, returned: bool, limits: bool = True) -> RankState:
        """Return the state of the rank whose board was copied. returned: its worker has.

        limits: time limits of waits count, so a rank whose wait has one may do anything.
        """
        rank = snapshot.rank
        waits = snapshot.waits if snapshot.waits_forever or not limits else ()
        status = "waiting" if waits else "running"
        state = cls(rank, status, waits[0] if waits else None, alternatives=waits[1:])
        if returned:  # its callbacks are still to come
            callbacks = tuple(snapshot.callbacks)
            soon = limits and bool(callbacks) and snapshot.is_limited_elsewhere
            state = cls(rank, "running" if soon else "returned", alternatives=callbacks)
        for (kind, peer, tag, group), (posted, given_up) in snapshot.counts().items():
            if kind == "send":
                state.sends[rank, peer, tag, group] = posted
            elif kind == "recv":
                state.recvs[peer, rank, tag, group] = posted
            elif kind == "any":
                state.any_source[tag, group] = posted - given_up
            else:
                state.collectives[group] = posted
        for event in snapshot.given_up:
            state.given_up.setdefault(event.channel, {})[event.sequence] = event
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
    gone = {rank for rank in at if at[rank].status == "returned"}
    dead = {rank for rank in gone if not at[rank].alternatives} | waiting.keys()
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
    return {rank: ways[0][1] for rank, ways in waiting.items() if rank in dead - gone}


def _ways(state: RankState) -> list[RankState]:
    """Return a state for each way in which a rank may go on: one for each wait or callback."""
    events = state.alternatives
    if state.status == "waiting":
        events = (state.waits_for, *events) if state.waits_for is not None else ()
    return [replace(state, status="waiting", waits_for=event, alternatives=()) for event in events]


def _can_go(state: RankState, peers: tuple[int, ...], dead: set[int]) -> bool:
    """Return whether ranks that are not dead could complete what this one waits for."""
    event = state.waits_for
    assert event is not None
    unknown = event.root is not None and needed(event) is None  # which ranks it needs
    if unknown and event.root not in (state.rank, *peers):
        return True  # the root has joined: a rank may leave before the others join
    if event.method == "new_group" and (members := needed(event)) is not None:
        peers = tuple(peer for peer in peers if peer in members)
    enough = any if one_is_enough(event) or unknown else all
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
        ranks = needed(event)
        ranks = _other_members(state, event) if ranks is None else ranks
        missing = tuple(r for r in ranks if not _has_joined(at.get(r), event))
        if missing and event.method == "new_group":  # ranks that are no members must call it, too
            missing = tuple(
                r for r in _other_members(state, event) if not _has_joined(at.get(r), event)
            )
        return missing or None
    if event.kind == "send":
        return None if _has_receive(at.get(event.peer), event) else (event.peer,)
    if event.kind == "key":  # while it waits, nobody has set the key
        return tuple(rank for rank in sorted(at) if rank != state.rank)
    if event.kind != "recv":
        return None
    sources = _other_members(state, event) if event.peer is None else (event.peer,)
    return None if any(_has_sent(at.get(rank), state, event) for rank in sources) else sources


def _other_members(state: RankState, event: Event) -> tuple[int, ...]:
    return tuple(rank for rank in event.group.ranks if rank != state.rank)


def needed(event: Event) -> tuple[int, ...] | None:
    """Return the ranks without which this one cannot leave a collective; None if that is unknown.

    A rank that only sends, or only receives, may leave before all have joined.
    """
    backends = event.group.backends.split(",")
    known = (name for name in ("gloo", shm.NAME, mpi.NAME) if f"{event.device}:{name}" in backends)
    backend, members = next(known, ""), event.group.ranks
    size, me = len(members), members.index(event.rank)
    root = me if event.root is None else members.index(event.root)
    if backend and event.method == "new_group":  # it connects the new group's members
        ranks = {members.index(member) for member in event.inputs[0]}
    elif backend == "gloo":
        ranks = _needed_on_gloo(event, size, me, root)
    elif backend == shm.NAME:
        ranks = _needed_on_shm(event, size, me, root)
    else:
        return None
    return tuple(members[number] for number in sorted(ranks - {me}))


def _needed_on_gloo(event: Event, size: int, me: int, root: int) -> set[int]:
    """Return the numbers of the ranks that this one, number `me`, needs on gloo.

    It follows from the algorithms in https://github.com/pytorch/gloo/tree/main/gloo: broadcast.cc,
    a tree, in which the parent of a rank is its number after the root without its highest bit;
    gather.cc and scatter.cc, with the root in the middle; reduce.cc, a ring.
    """
    if event.method == "broadcast":
        at = (me - root) % size
        parents = {at & ((1 << bit) - 1) for bit in range(at.bit_length())}
        children = {n for n in range(1, size) if n ^ (1 << n.bit_length() - 1) == at}
        return {(n + root) % size for n in parents | children}
    if me != root and event.method in ("gather", "scatter"):
        return {root}
    if me != root and event.method == "reduce" and me >= (chunks := _chunks(event)):
        # The ring goes down from rank to rank. Only the first ranks own a chunk, and their chunks
        # end with them, so this one needs the ranks before it on the way, and the next one.
        return {me - 1, *range(me + 1, size), *range(chunks - 1)} if chunks else set()
    return set(range(size))


def _needed_on_shm(event: Event, size: int, me: int, root: int) -> set[int]:
    """Return the numbers of the ranks that this one, number `me`, needs with shm."""
    fits = event.method == "broadcast" and event.nbytes <= SLOTS * SLOT  # else it waits for readers
    if me != root and (fits or event.method in ("gather", "scatter")):
        return {root}
    return set(range(size))


def _chunks(event: Event) -> int:
    """Return into how many chunks gloo cuts the tensor of a reduce; the first ranks own them."""
    size, elements = len(event.group.ranks), prod(event.shape)
    if not event.nbytes or not elements:
        return 0
    itemsize = event.nbytes // elements
    segment = min(-(-event.nbytes // (2 * size)), 1 << 20)
    segment += -segment % itemsize
    segments = max(-(-event.nbytes // segment), 2 * size)
    return -(-event.nbytes // (-(-segments // size) * segment))


def _has_joined(state: RankState | None, event: Event) -> bool:
    return state is not None and state.collectives.get(event.group, 0) > event.sequence


def _has_receive(state: RankState | None, event: Event) -> bool:
    return state is not None and (
        _is_posted(state.recvs, state, event)
        or state.any_source.get((event.tag, event.group), 0) > 0
    )


def _has_sent(sender: RankState | None, receiver: RankState, event: Event) -> bool:
    if sender is None:
        return False
    channel = sender.rank, receiver.rank, event.tag, event.group
    if event.peer is not None:
        return _is_posted(sender.sends, sender, event)
    # A receive from any source has no sequence number on a channel before it is complete.
    sent = sender.sends.get(channel, 0) - len(sender.given_up.get(channel, ()))
    return sent > receiver.recvs.get(channel, 0)


def _is_posted(posted: Mapping[Channel, int], peer: RankState, event: Event) -> bool:
    """Return whether a peer has posted the other end of a message, and has not given it up.

    The nth receive of a channel gets the nth message, or none if that one was given up: gloo takes
    the buffer from the Work, and a transfer that has none stops. https://github.com/pytorch/gloo
    """
    given_up = event.sequence in peer.given_up.get(event.channel, ())
    return posted.get(event.channel, 0) > event.sequence and not given_up


def blocked(states: Sequence[RankState]) -> dict[int, list[Event]]:
    """Return the waiting ranks for which all is posted, but maybe not over a connection that works.

    Each comes with the messages for which that is so: both ends were called, and one was given up.
    If it was in flight, gloo stops in the middle of it, and nothing passes after it. Whether it was
    is unknown, so this explains only waits that last too long.
    """
    at = {state.rank: state for state in states}
    given_up = [one for state in states for by in state.given_up.values() for one in by.values()]
    lost = [one for one in given_up if _was_met(one, at)]
    found = {}
    for rank, state in sorted(at.items()):
        event = state.waits_for
        if lost and event and state.status == "waiting" and _needs(state, at) is None:
            between = {rank, event.peer} if event.peer is not None else {*event.group.ranks}
            here = [one for one in lost if one.group == event.group and one.rank in between]
            here = [one for one in here if one.peer is None or one.peer in between]
            found |= {rank: here} if here else {}
    return found


def _was_met(one: Event, at: Mapping[int, RankState]) -> bool:
    """Return whether somebody has called the other end of a message."""
    if one.peer is None:
        return any(
            channel[1:] == one.channel[1:] for state in at.values() for channel in state.sends
        )
    peer = at.get(one.peer)
    if peer is not None and one.kind == "send" and peer.any_source.get((one.tag, one.group), 0) > 0:
        return True
    posted = {} if peer is None else peer.recvs if one.kind == "send" else peer.sends
    return posted.get(one.channel, 0) > one.sequence


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
