"""Why stuck ranks can never continue: the smallest true explanation, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddp_kit.error_text import Call, Wait, name_ranks
from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.trace.events import Event, format_arguments
from ddp_kit.verdict.graph import Channel, RankState, from_any_source, one_is_enough, shortest_cycle

_COUNT = "Every receive needs a send and every send a receive: count them on both ranks."
_FOR_TWO = "If the worker is meant for two ranks, pass world_size=2."
_RECV_FIRST = (
    "Let one rank send before it receives, or start the receives with irecv and wait for them "
    "after the sends."
)
_SEND_FIRST = (
    "A send may block until its receive is posted: let one rank receive before it sends, or start "
    "both with isend and irecv and wait afterwards."
)
_KEEP_WORK = "Keep what {} returns and call its wait(); otherwise the message may be lost."
_ADDRESS = "A send and its receive must have the same tag and the same group."
_COLLECTIVE = (
    "Every rank of a group must call the same collectives in the same order: look for an if, a "
    "loop or a return that skips one."
)
_KEY = "Check how the key is spelled, and let a rank set it before it waits for other ranks."


@dataclass(frozen=True)
class Verdict:
    """Why a run can never end, or in what its ranks disagree; as in the error made from it.

    waits: of the stuck ranks; () if ranks disagree, and then `calls` are what they called.
    """

    fact: str
    hint: str
    waits: tuple[Wait, ...] = ()
    returned: tuple[int, ...] = ()
    dropped: tuple[Wait, ...] = ()
    calls: tuple[Call, ...] = ()
    absent: tuple[int, ...] = ()

    def error(self) -> DeadlockError | MismatchError:
        if self.waits:
            return DeadlockError(self.fact, self.waits, self.hint, self.returned, self.dropped)
        error = MismatchError(self.fact, self.calls, self.hint)
        error.absent = self.absent
        return error


_Ranks = Mapping[int, RankState]
_Waits = Mapping[int, tuple[int, ...]]
_Explanation = tuple[str, str]  # the fact and the hint


def explain(states: Sequence[RankState], waits: _Waits, forever: bool = True) -> _Explanation:
    """Return why ranks are stuck, and a hint.

    waits: what `stuck` has returned for the states. forever: no time limit ends their waits.
    """
    at = {state.rank: state for state in states}
    returned = {state.rank for state in states if state.status == "returned"}
    # A receive from any of several ranks waits for none of them in particular.
    free = {rank for rank in waits if len(waits[rank]) != 1 and one_is_enough(_event(at[rank]))}
    edges = {rank: waits[rank] for rank in sorted(waits) if rank not in free}
    for rank, peers in edges.items():
        if gone := [peer for peer in peers if peer in returned]:
            return _returned_without_it(at, waits, rank, gone)
    for rank, peers in edges.items():
        if len(peers) == 1 and (dropped := _dropped_work(at, rank, peers[0])):
            return dropped
    cycle = shortest_cycle(edges)
    return (
        _cycle(at, waits, cycle, forever) if cycle else _nobody_left(at, waits, min(free), returned)
    )


def _event(state: RankState) -> Event:
    assert state.waits_for is not None, "a stuck rank waits for something"
    return state.waits_for


def _together(at: _Ranks, waits: _Waits, rank: int) -> list[int]:
    """Return the stuck ranks that wait in the same collective for the same ranks as `rank`."""
    event = _event(at[rank])
    if event.kind != "collective":
        return [rank]
    same = (r for r in sorted(waits) if waits[r] == waits[rank])
    return [r for r in same if _event(at[r]).match_key == event.match_key]


def _returned_without_it(at: _Ranks, waits: _Waits, rank: int, gone: list[int]) -> _Explanation:
    """Explain a wait for ranks that have returned."""
    event, has = _event(at[rank]), "has" if len(gone) == 1 else "have"
    if event.kind == "collective":
        wait = ranks_do(_together(at, waits, rank), "wait")
        who = f"{name_ranks(gone)}, which {has} returned without calling it"
        return f"{wait} in {format_operation(event, at)} for {who}", _COLLECTIVE
    if event.kind == "key":
        return _nobody_left(at, waits, rank, set(gone))
    peer = at[gone[0]]
    if channel := _misdirected(at[rank], peer):
        return _wrong_address(peer.rank, at[rank], channel)
    if dropped := _dropped_work(at, rank, peer.rank):
        return dropped
    posted = peer.recvs if event.kind == "send" else peer.sends
    channel = _channel(event, peer.rank)
    done = posted.get(channel, 0)
    # A receive from any source has no sequence number on a channel before it is complete.
    before = at[rank].recvs.get(channel, 0) if from_any_source(event) else event.sequence
    pair = {rank, peer.rank}
    one_kind = not any({c[0], c[1]} == pair and c[2:] != (event.tag, event.group) for c in posted)
    such = "" if one_kind and not event.tag else f" with tag {event.tag}"
    message = f"a {_ordinal(before + 1)} message{such}" if done else f"a message{such}"
    these = f"{done:,}{' of these' if such else ''} and has returned"
    if event.kind == "send":
        end = f"received {these}" if done else "has returned without receiving it"
        return f"rank {rank} sends {message} to rank {peer.rank}, which {end}", _count(at, waits)
    end = f"sent {these}" if done else "has returned without sending it"
    return f"rank {rank} waits for {message} from rank {peer.rank}, which {end}", _count(at, waits)


def _count(at: _Ranks, waits: _Waits) -> str:
    """Return the hint for a missing message: for a worker of two ranks that runs on more, both."""
    well = [rank for rank in at if at[rank].status == "returned"]
    # A single rank that is stuck rather has a mistake of its own.
    return f"{_COUNT} {_FOR_TWO}" if sorted(well) == [0, 1] and len(waits) > 1 else _COUNT


def _dropped_work(at: _Ranks, rank: int, peer: int) -> _Explanation | None:
    """Explain a wait for a message that the peer has started, and dropped its Work."""
    event = _event(at[rank])
    if not dropped_on(at[peer], event):
        return None
    if event.kind == "recv":
        fact, call = f"rank {rank} waits for a message from rank {peer}", "isend"
    else:
        fact, call = f"rank {rank} waits until rank {peer} receives", "irecv"
    return f"{fact}, which started an {call} but never waited for it", _KEEP_WORK.format(call)


def dropped_on(peer: RankState, event: Event) -> list[Event]:
    """Return the other ends of a message, and of later ones, whose Work the peer has dropped."""
    if event.kind == "collective":
        return []
    dropped = peer.given_up.get(_channel(event, peer.rank), {})
    return [dropped[n] for n in sorted(dropped) if event.peer is None or n >= event.sequence]


def explain_blocked(at: _Ranks, rank: int, dropped: Event) -> _Explanation:
    """Explain a wait for what all have called, after the Work of a message was dropped."""
    event, call = _event(at[rank]), "isend" if dropped.kind == "send" else "irecv"
    called = (
        "which all its ranks have called"
        if event.kind == "collective"
        else "whose other end has been called"
    )
    fact = f"rank {rank} waits in {format_operation(event, at)}, {called}, but rank {dropped.rank}"
    return f"{fact} never waited for its {call}, which blocks the connection", _KEEP_WORK.format(
        call
    )


def _channel(event: Event, peer: int) -> Channel:
    ends = (event.rank, peer) if event.kind == "send" else (peer, event.rank)
    return (*ends, event.tag, event.group)


def _misdirected(receiver: RankState, sender: RankState) -> Channel | None:
    """Return the channel of a message that this stuck receiver may be waiting for elsewhere."""
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


def _wrong_address(src: int, receiver: RankState, channel: Channel) -> _Explanation:
    """Explain a message whose tag or group is not that of the receive."""
    event, (_, dst, tag, group) = _event(receiver), channel
    if tag != event.tag:
        sent, asked = f"with tag {tag}", f"with tag {event.tag}"
    elif set(group.ranks) != set(event.group.ranks):
        sent, asked = (f"in the group of {name_ranks(g.ranks)}" for g in (group, event.group))
    else:
        sent, asked = "in one group", "in another group with the same ranks"
    whom = "any rank" if event.peer is None else f"rank {src}"
    fact = f"rank {src} sends to rank {dst} {sent}, but rank {dst} receives from {whom} {asked}"
    return fact, _ADDRESS


def _cycle(at: _Ranks, waits: _Waits, cycle: list[int], forever: bool) -> _Explanation:
    """Explain ranks each of which waits for the next, and the last for the first."""
    links = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    if len(cycle) == 2:
        for receiver, sender in links:
            if channel := _misdirected(at[receiver], at[sender]):
                return _wrong_address(sender, at[receiver], channel)
    kinds = {_event(at[rank]).kind for rank in cycle}
    clauses, groups = [], {}
    for rank, peer in links:
        event, wait = _event(at[rank]), ranks_do(_together(at, waits, rank), "wait")
        if event.kind == "collective":
            operation = format_operation(event, at)
            same = groups.setdefault(operation, event.group) == event.group
            other = "" if same else " of another group"
            clauses.append(f"{wait} in {operation}{other} for rank {peer}")
        elif event.kind == "send":
            clauses.append(f"{wait} until rank {peer} receives")
        elif event.kind == "key":
            clauses.append(f"{wait} for {_keys(event)[0]}")
        else:
            message = "" if kinds == {"recv"} else "a message from "
            clauses.append(f"{wait} for {message}rank {peer}")
    if len(clauses) > 5:  # the first ones show the pattern, and every wait is listed below anyway
        clauses[2:-1] = ["and so on"]
    named = {other for rank in cycle for other in _together(at, waits, rank)}
    nobody = "neither can" if len(named) == 2 else "none of them can"
    nobody += " ever" if forever else ""
    verb, hint = {
        frozenset({"recv"}): ("send", _RECV_FIRST),
        frozenset({"send"}): ("receive", _SEND_FIRST),
        frozenset({"send", "recv"}): ("continue", _SEND_FIRST),
    }.get(frozenset(kinds), ("continue", _KEY if "key" in kinds else _COLLECTIVE))
    return f"{', '.join(clauses)}: {nobody} {verb}", hint


def _nobody_left(at: _Ranks, waits: _Waits, rank: int, returned: set[int]) -> _Explanation:
    """Explain a wait for any rank, when no rank is left that could send, or set the key."""
    for peer in waits[rank]:
        if channel := _misdirected(at[rank], at[peer]):
            return _wrong_address(peer, at[rank], channel)
    gone = [peer for peer in waits[rank] if peer in returned]
    left = [peer for peer in waits[rank] if peer not in returned]
    why = [f"{name_ranks(gone)} {'has' if len(gone) == 1 else 'have'} returned"] if gone else []
    why += [f"{ranks_do(left, 'wait')} too"] if left else []
    if _event(at[rank]).kind == "key":
        because = " and ".join(why) or "it is the only rank"
        keys, which = _keys(_event(at[rank]))
        return f"rank {rank} waits for {keys}, {which}, but {because}", _KEY
    because = " and ".join(why) or "it is the only rank in the group"
    return f"rank {rank} waits for a message from any rank, but {because}", _COUNT


def _keys(event: Event) -> tuple[str, str]:
    """Return the keys that a rank waits for: ("the key 'address'", "which no rank has set")."""
    keys = event.op.partition("(")[2][:-1].strip("[]")
    if "', '" in keys:
        return f"the keys {keys}", "which are not all set"
    return f"the key {keys}", "which no rank has set"


def format_operation(event: Event, world: Iterable[int]) -> str:
    """Return an operation as it was called: "recv(src=1, tag=2)", "barrier".

    world: all ranks; a group is named unless it has all of them.
    """
    given = format_arguments(event.method, event.peer, event.tag, event.root)
    if event.reduce_op not in (None, "SUM"):
        given.append(f"op={event.reduce_op}")
    if event.method == "new_group":
        given += [str(list(ranks)) for ranks in event.inputs]
    if event.splits:
        names = ("input_split_sizes", "output_split_sizes")
        given += [f"{name}={list(sizes)}" for name, sizes in zip(names, event.splits, strict=False)]
    if event.kind != "key" and set(event.group.ranks) != set(world):
        given.append(f"group={list(event.group.ranks)}")
    return f"{event.op}({', '.join(given)})" if given else event.op


def ranks_do(ranks: Iterable[int], verb: str) -> str:
    """Return ranks with their verb: "rank 0 waits", "ranks 0 and 1 wait"; `verb` is the plural."""
    ranks = tuple(ranks)
    return f"{name_ranks(ranks)} {verb}{'s' if len(ranks) == 1 else ''}"


def _ordinal(number: int) -> str:
    """Return the ordinal of a number: "2nd", "12th", "23rd"."""
    last = 0 if number % 100 in (11, 12, 13) else number % 10
    return f"{number:,}{({1: 'st', 2: 'nd', 3: 'rd'}).get(last, 'th')}"
