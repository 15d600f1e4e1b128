"""Makes events of what stands on a board."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ddp_kit.failures import Frame, Wait
from ddp_kit.trace.board import (
    CROWDED,
    EVENTS,
    GIVEN_UP,
    LIMITED,
    LOOKED_AFTER,
    VOID,
    Board,
    BoardCopy,
    Row,
)
from ddp_kit.trace.events import Event, Group, Trace, format_call

_NOBODY = Group("", ())
_BLOCKING = ("send", "recv")  # they give nothing that one could wait for


@functools.lru_cache(maxsize=32)
def _read_texts(texts: bytes) -> tuple[list[Any], list[tuple]]:
    """Return what the texts of a board say, by number, and (kind, peer, tag, group) of each count.

    The ranks of a run have the same texts as a rule, and so has the next run of a worker.
    """
    read: list[Any] = [None]
    counted: list[tuple] = []
    for line in texts.splitlines():
        what, *text = json.loads(line)
        if what == "group":
            read.append(Group(text[0], tuple(text[1])))
        elif what == "line":
            read.append(Frame(*text, own=True))
        elif what == "count":
            kind, peer, tag, group = text
            counted.append((kind, peer, tag, read[group] or _NOBODY))
            read.append(None)
        else:
            call = _read_call(*text)
            read.append(call | {"group": read[call["group"]] or _NOBODY})
    return read, counted


def _read_call(op: str, kind: str, method: str, group: int, *text: Any) -> dict[str, Any]:
    """Return what the text of a call says, by the names of Event; the group is a number still."""
    root, dtype, *shapes, reduce_op, nbytes, device = text
    inputs, outputs, splits = (tuple(map(tuple, side)) for side in shapes)
    return {
        "op": op,
        "kind": "recv" if kind == "any" else kind,
        "method": method,
        "group": group,
        "root": root,
        "dtype": dtype,
        "inputs": inputs,
        "outputs": outputs,
        "splits": splits,
        "reduce_op": reduce_op,
        "nbytes": nbytes,
        "device": device,
    }


def read_wait(board: Board, run: int, since: int) -> tuple[str, int] | None:
    """Return what a rank waits in, as in "recv(src=1)", and when that began; None: in nothing.

    A wait that began after `since` is left out. Times are nanoseconds of the monotonic clock.
    """
    found = board.waiting(run, since)
    if found is None:
        return None
    row, text = found
    return _call(row.peer, row.tag, text), row.waited


@functools.lru_cache(maxsize=256)
def _call(peer: int, tag: int, text: bytes) -> str:
    call = _read_call(*json.loads(text)[1:])
    return format_call(call["op"], call["method"], None if peer < 0 else peer, tag, call["root"])


class Snapshot:
    """One rank's board, made readable.

    rank: the number that the rank goes by. log: the copy of its board.
    """

    def __init__(self, rank: int, log: BoardCopy) -> None:
        self.rank, self.log = rank, log
        self._texts, self._counted = _read_texts(log.texts)

    def call(self, what: int) -> dict[str, Any]:
        """Return what the events have in common whose row says `what`, by the names of Event."""
        return self._texts[what] or {}

    @cached_property
    def events(self) -> list[Event]:
        """The events that were kept, in the order in which the rank called them."""
        rows = ((i, self.log.row(i)) for i in range(self._older, self.log.head.events))
        return [self._event(index, row) for index, row in rows if row.what and not row.bits & VOID]

    @property
    def dropped(self) -> int:
        """How many events were not kept: older ones, and those without room for their texts."""
        return self._older + sum(not what for what, *_ in self.log.kept())

    @property
    def _older(self) -> int:
        return max(0, self.log.head.events - EVENTS)

    @property
    def waiting(self) -> Event | None:
        """What the rank's worker waits for."""
        index = self.log.head.waiting
        if index < 0 or index < self._older or not self.log.row(index).what:
            return None
        return self._event(index, self.log.row(index))

    def as_wait(self) -> Wait:
        """Say where the rank is."""
        event = self.waiting
        return Wait(self.rank, event and event.call, event and event.where)

    @property
    def waits_for_ever(self) -> bool:
        """Its wait has no limit after which it would go on."""
        return self.waiting is not None and not self.log.head.bits & LIMITED

    @property
    def is_crowded(self) -> bool:
        """It has used more channels than can be counted."""
        return bool(self.log.head.bits & CROWDED)

    @property
    def unawaited(self) -> list[Event]:
        """Operations that nobody has waited for."""
        found = []
        for place, values in enumerate(self.log.kept()):
            row = Row(*values)
            if row.what and not row.waited and not row.bits & (LOOKED_AFTER | VOID):
                if self.call(row.what)["op"] in _BLOCKING:
                    continue  # a thread was about to wait in it when the worker returned
                rounds = (self.log.head.events - 1 - place) // EVENTS
                found.append(self._event(place + rounds * EVENTS, row))
        return sorted(found, key=lambda event: event.index)

    @property
    def latest(self) -> int:
        """The newest moment on the board, in nanoseconds; 0: there is none."""
        newest = max((max(row[-3:]) for row in self.log.kept()), default=0)
        return max(self.log.head.began, self.log.head.ended, newest)

    def counts(self) -> dict[tuple, tuple[int, int]]:
        """Return how many operations were posted, and how many of them were given up.

        By (kind, peer, tag, group): kind is "send", "recv", "any" or "collective".
        """
        keys = self._counted[: self.log.head.counted]
        return {key: self.log.count(slot) for slot, key in enumerate(keys)}

    def _event(self, index: int, row: Row) -> Event:
        return Event(
            rank=self.rank,
            index=index,
            peer=None if row.peer < 0 else row.peer,
            tag=row.tag,
            sequence=row.sequence,
            start=row.start,
            waited=row.waited or None,
            end=row.end or None,
            where=self._texts[row.where],
            given_up=bool(row.bits & GIVEN_UP),
            **self._texts[row.what],
        )


class _Events(Sequence):
    """The events of several ranks, made when somebody asks for one."""

    def __init__(self, snapshots: list[Snapshot]) -> None:
        self._snapshots = snapshots

    @cached_property
    def _made(self) -> tuple[Event, ...]:
        return tuple(event for snapshot in self._snapshots for event in snapshot.events)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)

    def __reduce__(self) -> tuple:
        return tuple, (self._made,)


def join(snapshots: list[Snapshot]) -> Trace:
    """Return what all ranks of a run communicated."""
    return Trace(
        len(snapshots),
        _Events(snapshots),
        tuple(snapshot.dropped for snapshot in snapshots),
        _spans(snapshots),
    )


def _spans(snapshots: list[Snapshot]) -> tuple[tuple[int, int], ...]:
    """Return when each worker began and ended; one that was stopped, at the latest moment seen."""
    spans = [(snapshot.log.head.began, snapshot.log.head.ended) for snapshot in snapshots]
    if all(map(all, spans)):
        return tuple(spans)
    first = min((began for began, _ in spans if began), default=0)
    last = max((snapshot.latest for snapshot in snapshots), default=0)
    return tuple((began or first, ended or last) for began, ended in spans)
