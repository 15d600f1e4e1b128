"""Ranks that made different calls where they should have made the same one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ddp_kit.error_text import Call, count, name_ranks
from ddp_kit.trace import Snapshot
from ddp_kit.trace.board import RowBits
from ddp_kit.trace.events import Event, Shape, format_root
from ddp_kit.verdict.explanation import Verdict, format_operation, ranks_do

_SAME_CALLS = "All ranks of a group must call the same collectives, in the same order."
_SAME_TENSORS = "All ranks must pass tensors of the same shape and dtype to a collective."
_SAME_CHUNKS = "What one rank sends to another must have the shape that the other expects."
_SAME_DEVICE = (
    "All ranks must pass tensors on the same kind of device: .to(kit.device()) moves one there."
)
_SAME_BUFFER = "Receive into a tensor with as many elements and the same dtype as the one sent."
_SAME_ORDER = "gloo ignores strides: pass the .contiguous() of each tensor."
_SAME_GROUPS = (
    "All ranks must create the same groups in the same order, including those that they do not "
    "belong to."
)

_CREATED_BY_ALL = (
    "All ranks must call new_group, including those that the new group does not include, unless "
    "its members pass use_local_synchronization=True."
)


_Wrong = tuple[str, str, list[Event]]  # the fact, the hint, and the calls to show


def mismatch(events: Iterable[Event]) -> Verdict | None:
    """Return the first disagreement, in the order of the lowest rank's calls; None if all agree.

    Only calls that were made are compared: it does not matter that a rank is missing.
    """
    events = list(events)
    return _first_mismatch(events, _ranks_of(events))


def mismatch_of(
    snapshots: Sequence[Snapshot], waits: Collection[Event] | None = None
) -> Verdict | None:
    """Return the first disagreement of these ranks, as `mismatch` does.

    waits: only these operations are compared; None: all.
    """
    events, world = _doubtful(snapshots)
    if waits is not None:
        waited_for, world = {event.match_key for event in waits}, _ranks_of(waits)
        events = [event for event in events if event.match_key in waited_for]
    return _first_mismatch(events, world)


def _ranks_of(events: Iterable[Event]) -> set[int]:
    return {rank for event in events for rank in (event.rank, *event.group.ranks)}


def _first_mismatch(events: Sequence[Event], world: set[int]) -> Verdict | None:
    together: dict[tuple, list[Event]] = {}
    for event in events:
        together.setdefault(event.match_key, []).append(event)
    for calls in together.values():
        wrong = _message(calls) if calls[0].kind != "collective" else _collective(calls)
        if wrong:
            fact, hint, shown = wrong
            return Verdict(fact, hint, calls=_calls(shown, world))
    return None


def _doubtful(snapshots: Sequence[Snapshot]) -> tuple[list[Event], set[int]]:
    """Return the events of the calls that differ between ranks, and all ranks that may call.

    Nearly all calls are the same on all ranks. The rows of the boards show that, and to make events
    of all rows would take ten times as long.
    """
    numbers: dict[Any, int] = {}  # to compare, and to hash, numbers instead of shapes
    met: dict[tuple, int] = {}
    doubtful: set[tuple] = set()
    world: set[int] = set()
    for snapshot in snapshots:
        known: dict[int, tuple] = {}
        rank = snapshot.rank
        for what, _, peer, bits, tag, sequence, *_ in snapshot.board.kept():
            if bits & RowBits.VOID or not what:
                continue
            if what not in known:
                call = snapshot.call(what)
                group, common = call["group"], _in_common(call)
                world |= {rank, *group.ranks}
                number = numbers.setdefault(group, len(numbers))
                known[what] = call["kind"], group, number, numbers.setdefault(common, len(numbers))
            kind, group, number, common = known[what]
            ends = (rank, peer) if kind == "send" else (peer, rank)
            channel = () if kind == "collective" else (*ends, tag)
            if met.setdefault((*channel, number, sequence), common) != common:
                doubtful.add(((*channel, group) if channel else group, sequence))
    if not doubtful:
        return [], world
    events = (event for snapshot in snapshots for event in snapshot.events)
    return [event for event in events if event.match_key in doubtful], world


def _in_common(call: Mapping[str, Any]) -> tuple:
    """Return what the ranks of a call have in common. call: the fields of its Event by name."""
    if call["kind"] != "collective":
        return call["nbytes"], call["dtype"], call["device"]
    names = ("method", "splits", "inputs", "outputs", "root", "reduce_op", "dtype", "device")
    common = *(call[name] for name in names), call["strides"]
    in_chunks = call["method"] in _CHUNKS and len({*call["inputs"], *call["outputs"]}) > 1
    if call["splits"] or in_chunks:
        return (*common, object())  # ranks may disagree although all make this very call
    return common


def _message(calls: list[Event]) -> _Wrong | None:
    """Return how the two ends of a message differ; None if they fit, or there is one end."""
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
        sent, room = count(send.nbytes, "byte"), count(recv.nbytes, "byte")
    else:
        return None
    fact = f"rank {send.rank} sends {sent}, rank {recv.rank} receives into a tensor of {room}"
    return fact, _SAME_BUFFER, calls


# What all calls of a collective share, how to write it, and the hint. A call with "" or None has
# nothing to compare, such as the dtype of a rank that passes no tensor.
_COMMON: list[tuple[Callable[[Event], Hashable], Callable[[Event], str], str]] = [
    (
        lambda e: e.root,
        lambda e: format_root(e.method, e.root),
        "All ranks must use the same root.",
    ),
    (lambda e: e.reduce_op, lambda e: f"op={e.reduce_op}", "All ranks must use the same op."),
    (lambda e: e.dtype, lambda e: e.dtype, _SAME_TENSORS),
    (
        lambda e: e.strides,
        lambda e: f"a tensor of strides {e.strides}" if e.strides else "a contiguous tensor",
        _SAME_ORDER,
    ),
]


def _collective(calls: list[Event]) -> _Wrong | None:
    """Return how the calls of a collective differ; None if in nothing that matters."""
    first = calls[0]
    if any(call.method != first.method for call in calls):
        one_name = len({call.op for call in calls}) == 1
        fact = _by_value(calls, lambda e: e.method, lambda e: e.method if one_name else "")
        return fact, _SAME_CALLS, calls
    for value, text, hint in _COMMON:
        if len({value(call) for call in calls} - {None, ""}) > 1:
            named = [call for call in calls if value(call) not in (None, "")]
            return _by_value(named, value, text), hint, calls
    if _unfinished(calls) and len({call.device for call in calls if call.shape}) > 1:
        holders = [call for call in calls if call.shape]
        fact = _by_value(holders, lambda e: e.device, lambda e: f"a tensor on {e.device}")
        return fact, _SAME_DEVICE, calls
    if first.method in _CHUNKS:
        return _unequal_chunk(calls)
    if first.method == "new_group":
        if len({_tensors(call) for call in calls}) == 1:
            return None
        fact = _by_value(calls, _tensors, lambda e: ", ".join(str(list(r)) for r in e.inputs))
        return fact, _SAME_GROUPS, calls
    # PyTorch compares no shapes: a rank may pass (4,) where another one passes (2, 2).
    if len({tuple(map(prod, _tensors(call))) for call in calls}) == 1:
        return None
    fact = _by_value(calls, _tensors, lambda e: _shapes(_tensors(e)) if _tensors(e) else "nothing")
    return fact, _SAME_TENSORS, calls


def half_created(snapshots: Sequence[Snapshot]) -> Verdict | None:
    """Return a new_group that some ranks have called and others have not.

    None if there is none. Every worker must have returned: one that is still running may call it.
    """
    if not any(b'"new_group"' in texts for texts in {each.board.texts for each in snapshots}):
        return None  # nearly always, and ranks often have the same texts
    if any(each.dropped for each in snapshots):
        return None  # the call may be among these
    created: dict[tuple, list[Event]] = {}
    for event in (event for each in snapshots for event in each.events):
        if event.method == "new_group":
            created.setdefault(event.match_key, []).append(event)
    for calls in created.values():
        members, called = calls[0].group.ranks, {call.rank for call in calls}
        left = [each.rank for each in snapshots if each.rank in members and each.rank not in called]
        if left:
            fact = _by_value(calls, _tensors, lambda e: ", ".join(str(list(r)) for r in e.inputs))
            fact = f"{fact}, which {name_ranks(left)} never called"
            shown = _calls(calls, members)
            return Verdict(fact, _CREATED_BY_ALL, calls=shown, absent=tuple(left))
    return None


def _unfinished(calls: list[Event]) -> bool:
    """Return whether some rank never saw these calls complete.

    A kind of device may have a backend of its own, as with nccl, and then the calls never match.
    Where one backend serves all devices, they do.
    """
    return any(call.end is None for call in calls)


def _tensors(event: Event) -> tuple[Shape, ...]:
    return event.inputs or event.outputs


def _by_value(
    calls: list[Event], value: Callable[[Event], Hashable], text: Callable[[Event], str]
) -> str:
    """Write which ranks have which value: "rank 0 calls reduce with dst=0, rank 1 with dst=1"."""
    groups: dict[tuple, list[Event]] = {}
    for call in calls:
        groups.setdefault((call.op, value(call)), []).append(call)
    clauses, op_before = [], None
    for (op, _), same in groups.items():
        ranks, given = [call.rank for call in same], text(same[0])
        clause = name_ranks(ranks) if op == op_before else f"{ranks_do(ranks, 'call')} {op}"
        clauses.append(f"{clause} with {given}" if given else clause)
        op_before = op
    return ", ".join(clauses)


def _calls(events: Iterable[Event], world: Iterable[int]) -> tuple[Call, ...]:
    return tuple(_call(event, world) for event in events)


def _call(event: Event, world: Iterable[int]) -> Call:
    """Return a call with the tensors that it was given: "reduce(dst=0) with float32 of shape (4,)".

    world: all ranks; a group is named unless it has all of them.
    """
    operation = format_operation(event, world)
    on = f" on {event.device}" if event.device != "cpu" else ""
    if event.kind != "collective":
        of = f" of {event.dtype}" if event.dtype else ""
        operation = f"{operation} with {count(event.nbytes, 'byte')}{of}{on}"
    elif event.method != "new_group" and (event.inputs or event.outputs):
        into = f" into {_shapes(event.outputs)}" if event.inputs and event.outputs else ""
        operation = f"{operation} with {_shapes(_tensors(event), event.dtype)}{into}{on}"
    return Call(event.rank, operation, event.where)


def _shapes(shapes: tuple[Shape, ...], dtype: str = "") -> str:
    """Write tensors: "float32 of shape (4,)", "shapes (4,), (5,)", "3 tensors of shape (4,)"."""
    if len(shapes) > 1 and len(set(shapes)) == 1:
        return f"{len(shapes)} {dtype}{' ' * bool(dtype)}tensors of shape {shapes[0]}"
    text = f"shape{'s' * (len(shapes) > 1)} {', '.join(map(str, shapes))}"
    return f"{dtype} of {text}" if dtype else text


# --- collectives in which each rank sends each other rank a chunk of its own -------------------

_Chunks = tuple[list[Shape | None], list[Shape | None]]  # sent to and expected from each member


def _all_to_all_single(event: Event, size: int) -> _Chunks:
    rows = [*event.splits, (), ()]  # () where torch splits evenly
    return _split(event.inputs[0], rows[0], size), _split(event.outputs[0], rows[1], size)


def _split(shape: Shape, rows: Shape, size: int) -> list[Shape | None]:
    return [(n, *shape[1:]) for n in rows or [shape[0] // size] * size]


def _with_root(event: Event, shape: Shape) -> list[Shape | None]:
    return [shape if rank == event.root else None for rank in event.group.ranks]


_CHUNKS: dict[str, Callable[[Event, int], _Chunks]] = {
    "gather": lambda e, size: (_with_root(e, e.inputs[0]), [*e.outputs]),
    "scatter": lambda e, size: ([*e.inputs], _with_root(e, e.outputs[0])),
    "allgather": lambda e, size: ([e.inputs[0]] * size, [*e.outputs]),
    "reduce_scatter": lambda e, size: ([*e.inputs], [e.outputs[0]] * size),
    "alltoall": lambda e, size: ([*e.inputs], [*e.outputs]),
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
}


def _unequal_chunk(calls: list[Event]) -> _Wrong | None:
    """Return the first chunk that one rank sends with more or fewer elements than expected.

    calls: those of one collective, by rank; its method is in _CHUNKS. None if all chunks fit.
    """
    ranks = calls[0].group.ranks
    index = {rank: number for number, rank in enumerate(ranks)}
    chunks = {}
    for call in calls:
        try:
            chunks[call.rank] = _CHUNKS[call.method](call, len(ranks))
        except IndexError:
            return None  # not the tensors that this method takes, for which torch has raised
    for src in calls:
        for dst in calls:
            sent = _at(chunks[src.rank][0], index[dst.rank])
            expected = _at(chunks[dst.rank][1], index[src.rank])
            if sent is None or expected is None:
                continue
            if prod(sent) != prod(expected):
                whom = f"rank {dst.rank}" if dst is not src else "itself"
                fact = f"in {src.op}, rank {src.rank} sends shape {sent} to {whom}"
                who = f"rank {dst.rank} " if dst is not src else ""
                shown = {call.rank: call for call in (src, dst)}
                fact = f"{fact}, but {who}expects shape {expected}"
                return fact, _SAME_CHUNKS, [shown[rank] for rank in sorted(shown)]
    return None


def _at(shapes: list[Shape | None], index: int) -> Shape | None:
    """Return one member's shape; None where the list has another length."""
    return shapes[index] if index < len(shapes) else None
