"""Ranks that called different things where they should have called the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from ddp_kit.errors import MismatchError
from ddp_kit.failures import Call, count, name_ranks
from ddp_kit.trace.events import Event, Group, Shape, format_root
from ddp_kit.verdict.pieces import PIECEWISE, unequal_piece
from ddp_kit.verdict.words import called_with, shapes, whose

_SAME_CALLS = "All ranks of a group must call the same collectives, in one order."
_SAME_TENSORS = "All ranks must give a collective tensors of the same shape and dtype."
_SAME_PIECES = "What one rank gives to another must have the shape that the other takes."
_SAME_DEVICE = (
    "All ranks must bring tensors on the same kind of device: .to(kit.device()) puts one there."
)
_SAME_BUFFER = "Receive into a tensor with as many elements and the same dtype as the one sent."


def mismatch(events: Iterable[Event]) -> MismatchError | None:
    """Return the first disagreement, in the order of the lowest rank's calls; None: there is none.

    Only what has been called is compared: it does not matter that a rank is missing.
    """
    events = list(events)
    keys = _keys(events)
    for calls in _doubtful(events, keys):
        wrong = _message(calls) if calls[0].kind != "collective" else _collective(calls)
        if wrong:
            fact, hint, guilty = wrong
            world = {rank for event in events for rank in (event.rank, *event.group.ranks)}
            told = [Call(event.rank, called_with(event, world), event.where) for event in guilty]
            return MismatchError(fact, told, hint)
    return None


_Wrong = tuple[str, str, list[Event]]  # the fact, the hint, and the calls to show


def _keys(events: list[Event]) -> list[tuple]:
    """Return what the calls of one collective share, and the two ends of one message."""
    # Hashing a group takes longer than all the rest: do it once for each object.
    numbers: dict[Group, int] = {}
    by_id = {id(event.group): event.group for event in events}
    number = {key: numbers.setdefault(group, len(numbers)) for key, group in by_id.items()}
    keys: list[tuple] = []
    for event in events:
        group, kind = number[id(event.group)], event.kind
        if kind == "collective":
            keys.append((group, event.sequence))
        else:
            src, dst = event.rank, event.peer
            if kind == "recv":
                src, dst = dst, src
            keys.append((group, event.sequence, src, dst, event.tag))
    return keys


def _doubtful(events: list[Event], keys: list[tuple]) -> list[list[Event]]:
    """Return the calls that belong together and are not plainly alike, first called first."""
    first: dict[tuple, Event] = {}
    doubtful: dict[tuple, list[Event]] = {}
    for event, key in zip(events, keys, strict=True):
        other = first.setdefault(key, event)
        if other is not event and key not in doubtful and not _alike(event, other):
            doubtful[key] = []
    if doubtful:
        for event, key in zip(events, keys, strict=True):
            if key in doubtful:
                doubtful[key].append(event)
    return [doubtful[key] for key in first if key in doubtful] if doubtful else []


def _alike(one: Event, other: Event) -> bool:
    """Tell calls that cannot disagree. It is quick, because nearly all are like this."""
    if one.dtype != other.dtype or one.device != other.device:
        return False
    if one.kind != "collective":
        return one.nbytes == other.nbytes
    return (
        one.method == other.method
        and one.inputs == other.inputs
        and one.outputs == other.outputs
        and one.root == other.root
        and one.reduce_op == other.reduce_op
        and not one.splits
        and not other.splits
        and (one.method not in PIECEWISE or len({*one.inputs, *one.outputs}) == 1)
    )


def _message(calls: list[Event]) -> _Wrong | None:
    ends = {call.kind: call for call in calls}
    if len(ends) != 2:
        return None
    send, recv = ends["send"], ends["recv"]
    if send.device != recv.device and _unfinished(calls):
        sent = f"a tensor on {send.device}"
        fact = f"rank {send.rank} sends {sent}, rank {recv.rank} receives into one on {recv.device}"
        return fact, _SAME_DEVICE, calls
    if send.dtype != recv.dtype and send.dtype and recv.dtype:
        sent, room = send.dtype, recv.dtype
    elif send.nbytes != recv.nbytes:
        sent, room = count(send.nbytes, "byte"), f"{recv.nbytes:,}"
    else:
        return None
    fact = f"rank {send.rank} sends {sent}, rank {recv.rank} receives into a tensor of {room}"
    return fact, _SAME_BUFFER, calls


# What the ranks of a collective have in common, how to say it, and the hint. A rank with "" or
# None has nothing to compare, such as the dtype of a rank that gives no tensor.
_COMMON: list[tuple[Callable[[Event], Hashable], Callable[[Event], str], str]] = [
    (
        lambda e: e.root,
        lambda e: format_root(e.method, e.root),
        "All ranks must name the same root.",
    ),
    (lambda e: e.reduce_op, lambda e: f"op={e.reduce_op}", "All ranks must give the same op."),
    (lambda e: e.dtype, lambda e: e.dtype, _SAME_TENSORS),
]


def _collective(calls: list[Event]) -> _Wrong | None:
    """Say in what these calls differ; None: in nothing that matters."""
    first = calls[0]
    if any(call.method != first.method for call in calls):
        one_name = len({call.op for call in calls}) == 1
        fact = _by_value(calls, lambda e: e.method, lambda e: e.method if one_name else "")
        return fact, _SAME_CALLS, calls
    for value, words, hint in _COMMON:
        if len({value(call) for call in calls} - {None, ""}) > 1:
            named = [call for call in calls if value(call) not in (None, "")]
            return _by_value(named, value, words), hint, calls
    if _unfinished(calls) and len({call.device for call in calls if call.shape}) > 1:
        holders = [call for call in calls if call.shape]
        fact = _by_value(holders, lambda e: e.device, lambda e: f"a tensor on {e.device}")
        return fact, _SAME_DEVICE, calls
    if first.method in PIECEWISE:
        return _piece(calls)
    if len({_tensors(call) for call in calls}) == 1:
        return None
    if first.method == "new_group":
        hint = "All ranks must make the same groups in one order, also those they are not in."
        fact = _by_value(calls, _tensors, lambda e: ", ".join(str(list(r)) for r in e.inputs))
        return fact, hint, calls
    fact = _by_value(calls, _tensors, lambda e: shapes(_tensors(e)) if _tensors(e) else "nothing")
    return fact, _SAME_TENSORS, calls


def _unfinished(calls: list[Event]) -> bool:
    """Tell whether it never came to its end for somebody.

    A device may have a backend of its own, as with nccl, and then the calls never meet. Where one
    backend serves all devices, they do.
    """
    return any(call.end is None for call in calls)


def _tensors(event: Event) -> tuple[Shape, ...]:
    return event.inputs or event.outputs


def _by_value(
    calls: list[Event], value: Callable[[Event], Hashable], words: Callable[[Event], str]
) -> str:
    """Say which ranks have which value: "rank 0 calls reduce with dst=0, rank 1 with dst=1"."""
    groups: dict[tuple, list[Event]] = {}
    for call in calls:
        groups.setdefault((call.op, value(call)), []).append(call)
    clauses, told = [], None
    for (op, _), same in groups.items():
        who, what = [call.rank for call in same], words(same[0])
        does = name_ranks(who) if op == told else f"{whose(who, 'call')} {op}"
        clauses.append(f"{does} with {what}" if what else does)
        told = op
    return ", ".join(clauses)


def _piece(calls: list[Event]) -> _Wrong | None:
    pair = unequal_piece(calls)
    if pair is None:
        return None
    giver, gives, taker, takes = pair
    whom = f"rank {taker.rank}" if taker is not giver else "itself"
    fact = f"in {giver.op} rank {giver.rank} gives {whom} shape {gives}, but"
    fact = f"{fact} {f'rank {taker.rank}' if taker is not giver else 'it'} takes shape {takes}"
    return fact, _SAME_PIECES, sorted({giver.rank: giver, taker.rank: taker}.values(), key=_rank)


def _rank(event: Event) -> int:
    return event.rank
