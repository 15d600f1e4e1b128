"""Why stuck ranks can never go on: the smallest true explanation, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_kit.failures import name_ranks
from ddp_kit.trace.events import Event
from ddp_kit.verdict.graph import from_any_source, shortest_cycle
from ddp_kit.verdict.state import Channel, RankState
from ddp_kit.verdict.words import called, ordinal, whose

_COUNT = "Every receive needs a send and every send a receive: count them on both ranks."
_RECV_FIRST = (
    "Let one rank send before it receives, or start the receives with irecv and wait for them "
    "after the sends."
)
_SEND_FIRST = (
    "A send may last until its receive is posted: let one rank receive before it sends, or start "
    "both with isend and irecv and wait afterwards."
)
_KEEP_WORK = "Keep what isend returns, and call its wait(): without that the message may be lost."
_ADDRESS = "A send and its receive must have the same tag and the same group."
_COLLECTIVE = (
    "Every rank of a group must call the same collectives in the same order: look for an if, a "
    "loop or a return that leaves one out."
)

Waits = Mapping[int, tuple[int, ...]]


def explain(states: Sequence[RankState], waits: Waits) -> tuple[str, str]:
    """Return the fact and the usual hint. waits: of each stuck rank, as `stuck` returns them."""
    at = {state.rank: state for state in states}
    returned = {state.rank for state in states if state.status == "returned"}
    # A receive from one of several waits for none of them in particular.
    free = {rank for rank in waits if len(waits[rank]) != 1 and from_any_source(_event(at[rank]))}
    edges = {rank: waits[rank] for rank in sorted(waits) if rank not in free}
    for rank, peers in edges.items():
        gone = [peer for peer in peers if peer in returned]
        if gone:
            return _left_alone(at, waits, rank, gone)
    for rank, peers in edges.items():
        if len(peers) == 1 and (thrown := _thrown_away(at, rank, peers[0])):
            return thrown
    cycle = shortest_cycle(edges)
    return _circle(at, waits, cycle) if cycle else _no_sender(at, waits, min(free), returned)


def _event(state: RankState) -> Event:
    assert state.waits_for is not None, "a stuck rank waits for something"
    return state.waits_for


def _together(at: Mapping[int, RankState], waits: Waits, rank: int) -> list[int]:
    """Return the stuck ranks that wait in the same collective as `rank`, which is one of them."""
    event = _event(at[rank])
    if event.kind != "collective":
        return [rank]
    others = {other: _event(at[other]) for other in sorted(waits)}
    key = event.kind, event.group, event.sequence
    return [r for r, other in others.items() if (other.kind, other.group, other.sequence) == key]


def _left_alone(
    at: Mapping[int, RankState], waits: Waits, rank: int, gone: list[int]
) -> tuple[str, str]:
    """Explain a wait for ranks that have returned."""
    event, has = _event(at[rank]), "has" if len(gone) == 1 else "have"
    if event.kind == "collective":
        who = whose(_together(at, waits, rank), "wait")
        op = called(event, at)
        left = f"which {has} returned without calling it"
        return f"{who} in {op} for {name_ranks(gone)}, {left}", _COLLECTIVE
    peer = at[gone[0]]
    if astray := _astray(at[rank], peer):
        return _wrong_address(peer.rank, at[rank], astray)
    posted = peer.recvs if event.kind == "send" else peer.sends
    if thrown := _thrown_away(at, rank, peer.rank):
        return thrown
    channel = _channel(event, peer.rank)
    done = posted.get(channel, 0)
    # A receive from any source has no place on a channel before it is complete.
    place = at[rank].recvs.get(channel, 0) if from_any_source(event) else event.sequence
    pair = {rank, peer.rank}
    one_kind = not any({c[0], c[1]} == pair and c[2:] != (event.tag, event.group) for c in posted)
    such = "" if one_kind and not event.tag else f" with tag {event.tag}"
    message = f"a {ordinal(place + 1)} message{such}" if done else f"a message{such}"
    these = f"{done:,}{' of these' if such else ''} and has returned"
    if event.kind == "send":
        left = f"received {these}" if done else "has returned without receiving it"
        return f"rank {rank} sends {message} to rank {peer.rank}, which {left}", _COUNT
    left = f"sent {these}" if done else "has returned without sending it"
    return f"rank {rank} waits for {message} from rank {peer.rank}, which {left}", _COUNT


def _thrown_away(at: Mapping[int, RankState], rank: int, peer: int) -> tuple[str, str] | None:
    """Explain a receive whose message was started, and whose work nobody waited for."""
    event = _event(at[rank])
    if event.kind != "recv" or not at[peer].given_up.get(_channel(event, peer)):
        return None
    fact = f"rank {rank} waits for a message from rank {peer}, which started an isend"
    return f"{fact} and never waited for its work", _KEEP_WORK


def _channel(event: Event, peer: int) -> Channel:
    ends = (event.rank, peer) if event.kind == "send" else (peer, event.rank)
    return (*ends, event.tag, event.group)


def _astray(receiver: RankState, sender: RankState) -> Channel | None:
    """Return where a message went that this stuck receiver may be waiting for."""
    event = _event(receiver)
    if event.kind != "recv":
        return None
    channels = [
        channel
        for channel, sent in sender.sends.items()
        if channel[:2] == (sender.rank, receiver.rank)
        and channel[2:] != (event.tag, event.group)
        and sent > receiver.recvs.get(channel, 0)
    ]
    return min(channels, key=lambda c: (c[2], c[3].ranks, c[3].name), default=None)


def _wrong_address(src: int, receiver: RankState, channel: Channel) -> tuple[str, str]:
    """Explain a message that has another tag or group than the receive."""
    event, (_, dst, tag, group) = _event(receiver), channel
    if tag != event.tag:
        sent, asked = f"with tag {tag}", f"with tag {event.tag}"
    elif set(group.ranks) != set(event.group.ranks):
        sent, asked = (f"in the group of {name_ranks(g.ranks)}" for g in (group, event.group))
    else:
        sent, asked = "in one group", "in another with the same ranks"
    whom = "any rank" if event.peer is None else f"rank {src}"
    fact = f"rank {src} sends to rank {dst} {sent}, but rank {dst} receives from {whom} {asked}"
    return fact, _ADDRESS


def _circle(at: Mapping[int, RankState], waits: Waits, cycle: list[int]) -> tuple[str, str]:
    """Explain ranks of which each waits for the next, and the last for the first."""
    links = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    if len(cycle) == 2:
        for receiver, sender in links:
            if astray := _astray(at[receiver], at[sender]):
                return _wrong_address(sender, at[receiver], astray)
    kinds = {_event(at[rank]).kind for rank in cycle}
    clauses, groups = [], {}
    for rank, peer in links:
        event, who = _event(at[rank]), whose(_together(at, waits, rank), "wait")
        if event.kind == "collective":
            op = called(event, at)
            same = groups.setdefault(op, event.group) == event.group
            clauses.append(f"{who} in {op}{'' if same else ' of another group'} for rank {peer}")
        elif event.kind == "send":
            clauses.append(f"{who} until rank {peer} receives")
        else:
            message = "" if kinds == {"recv"} else "a message from "
            clauses.append(f"{who} for {message}rank {peer}")
    if len(clauses) > 5:  # one sees from the first what the others are like; all stand below
        clauses[2:-1] = ["and so on"]
    named = {other for rank in cycle for other in _together(at, waits, rank)}
    nobody = "neither can" if len(named) == 2 else "none of them can"
    verb, hint = {
        frozenset({"recv"}): ("send", _RECV_FIRST),
        frozenset({"send"}): ("receive", _SEND_FIRST),
        frozenset({"send", "recv"}): ("go on", _SEND_FIRST),
    }.get(frozenset(kinds), ("go on", _COLLECTIVE))
    return f"{', '.join(clauses)}: {nobody} ever {verb}", hint


def _no_sender(
    at: Mapping[int, RankState], waits: Waits, rank: int, returned: set[int]
) -> tuple[str, str]:
    """Explain a receive from any source that nobody is left to serve."""
    for peer in waits[rank]:
        if astray := _astray(at[rank], at[peer]):
            return _wrong_address(peer, at[rank], astray)
    gone = [peer for peer in waits[rank] if peer in returned]
    left = [peer for peer in waits[rank] if peer not in returned]
    why = [f"{name_ranks(gone)} {'has' if len(gone) == 1 else 'have'} returned"] if gone else []
    why += [f"{whose(left, 'wait')} too"] if left else []
    because = " and ".join(why) or "it has the group for itself"
    return f"rank {rank} waits for a message from any rank, but {because}", _COUNT
