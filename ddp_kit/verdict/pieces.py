"""Collectives in which each rank gives each other rank a piece of its own."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ddp_kit.trace.events import Event, Shape

_Pieces = tuple[list[Shape | None], list[Shape | None]]  # given to and taken from each member


def _gather(event: Event, size: int) -> _Pieces:
    given = [event.inputs[0] if r == event.root else None for r in event.group.ranks]
    return given, [*event.outputs]


def _scatter(event: Event, size: int) -> _Pieces:
    taken = [event.outputs[0] if r == event.root else None for r in event.group.ranks]
    return [*event.inputs], taken


def _all_gather(event: Event, size: int) -> _Pieces:
    return [event.inputs[0]] * size, [*event.outputs]


def _reduce_scatter(event: Event, size: int) -> _Pieces:
    return [*event.inputs], [event.outputs[0]] * size


def _all_to_all(event: Event, size: int) -> _Pieces:
    return [*event.inputs], [*event.outputs]


def _all_to_all_single(event: Event, size: int) -> _Pieces:
    rows = [*event.splits, (), ()]  # () where torch was left to split evenly
    return _split(event.inputs[0], rows[0], size), _split(event.outputs[0], rows[1], size)


def _split(shape: Shape, rows: Shape, size: int) -> list[Shape | None]:
    return [(n, *shape[1:]) for n in rows or [shape[0] // size] * size]


PIECEWISE: dict[str, Callable[[Event, int], _Pieces]] = {
    "gather": _gather,
    "scatter": _scatter,
    "allgather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
}


def unequal_piece(calls: list[Event]) -> tuple[Event, Shape, Event, Shape] | None:
    """Return who gives which shape, and who takes which other one for it; None: all agree.

    calls: of one collective, in the order of ranks; its method is in PIECEWISE.
    """
    first = calls[0]
    ranks = first.group.ranks
    place = {rank: index for index, rank in enumerate(ranks)}
    pieces = {}
    for event in calls:
        try:
            pieces[event.rank] = PIECEWISE[event.method](event, len(ranks))
        except IndexError:
            return None  # not the tensors that this method takes: torch has said so
    for giver in calls:
        for taker in calls:
            gives = _at(pieces[giver.rank][0], place[taker.rank])
            takes = _at(pieces[taker.rank][1], place[giver.rank])
            if gives is None or takes is None or gives == takes:
                continue
            if prod(gives) or prod(takes):  # pieces without elements are alike
                return giver, gives, taker, takes
    return None


def _at(shapes: list[Shape | None], place: int) -> Shape | None:
    """Return one member's shape; None where the list is of another length."""
    return shapes[place] if place < len(shapes) else None
