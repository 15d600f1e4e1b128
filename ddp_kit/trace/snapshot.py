"""What is on a board, as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from ddp_kit import settings
from ddp_kit.error_text import Frame, Wait
from ddp_kit.trace.board import Board, BoardCopy, HeadBits, Row, RowBits
from ddp_kit.trace.calls import read_call, read_texts
from ddp_kit.trace.events import Event, Trace


def read_wait(board: Board, run: int, since: int) -> tuple[str, int] | None:
    """Return what a rank waits in, as in "recv(src=1)", and since when; None if it does not wait.

    A wait that began after `since` does not count. Times are nanoseconds of the monotonic clock.
    """
    found = board.waiting(run, since)
    if found is None:
        return None
    row, text = found
    return read_call(None if row.peer < 0 else row.peer, row.tag, text), row.waited


class Snapshot:
    """What is on the board of one rank. board: a copy of it."""

    def __init__(self, rank: int, board: BoardCopy) -> None:
        self.rank, self.board = rank, board
        self._texts, self._counted = read_texts(board.texts)

    def call(self, what: int) -> dict[str, Any]:
        """Return what all events with this `what` in their row share, by the names of Event."""
        return self._texts[what] or {}

    @cached_property
    def events(self) -> list[Event]:
        """The events that were kept, in the order in which the rank called them."""
        return self._events_where(lambda row: not row.has(RowBits.VOID))

    @property
    def dropped(self) -> int:
        """How many events were not kept: the oldest ones, and those whose text had no room."""
        return self._older + sum(not what for what, *_ in self.board.kept())

    @property
    def _older(self) -> int:
        return max(0, self.board.head.events - settings.EVENTS_KEPT)

    @property
    def waiting(self) -> Event | None:
        """What the rank's worker waits for; None if it does not wait."""
        index = self.board.head.waiting
        if index < 0 or index < self._older or not self.board.row(index).what:
            return None
        return self._event(index, self.board.row(index))

    def as_wait(self) -> Wait:
        event = self.waiting
        return Wait(self.rank, event and event.call, event and event.where)

    @cached_property
    def thread_waits(self) -> list[Event]:
        """What other threads than the worker's own wait for."""
        return self._events_where(lambda row: row.has(RowBits.IN_THREAD))

    @cached_property
    def callbacks(self) -> list[Event]:
        """The operations with callbacks that are still to run, or running."""
        return self._events_where(lambda row: row.has(RowBits.CALLS_BACK))

    @property
    def joins(self) -> bool:
        """Whether the worker's own thread waits for other threads, and for nothing else."""
        return self.waiting is None and self.board.head.has(HeadBits.JOINS)

    @property
    def has_tasks(self) -> bool:
        """Whether a thread of a pool may run a callback, once a task is done."""
        return self.board.head.has(HeadBits.TASKS)

    @property
    def threads(self) -> dict[int, tuple[str, Frame | None]]:
        """Of threads that were started: the name, and the learner's line, by their `ident`."""
        return dict(text for text in self._texts if isinstance(text, tuple) and len(text) == 2)

    @property
    def notes(self) -> list[tuple[str, Frame | None]]:
        """What is to be said after the run, each with a line of the learner's."""
        return [text[1:] for text in self._texts if isinstance(text, tuple) and text[0] == "note"]

    def joining(self) -> Snapshot:
        """Return what the board would be if the worker's own thread waited for the others."""
        head = self.board.head
        head = head._replace(bits=head.bits | HeadBits.JOINS)
        return Snapshot(self.rank, self.board._replace(head=head))

    @property
    def waits(self) -> tuple[Event, ...]:
        """What the rank waits for; it can go on after any of these. (): it may do anything."""
        main = self.waiting
        if main is None and not (self.joins and self.thread_waits):
            return ()
        return (*([main] if main else []), *self.thread_waits, *self.callbacks)

    @property
    def waits_forever(self) -> bool:
        """Whether it waits, and no wait has a timeout that would end it."""
        limited = self.waiting is not None and self.board.head.has(HeadBits.LIMITED)
        return bool(self.waits) and not (limited or self.is_limited_elsewhere)

    @property
    def is_limited_elsewhere(self) -> bool:
        """Whether a timeout ends a wait of another thread, or lets a callback run."""
        limited = RowBits.LIMITED_THERE | RowBits.CALLS_BACK_SOON
        return bool(self._events_where(lambda row: row.has(limited)))

    @property
    def last_wait(self) -> Event | None:
        """What it began to wait for last; None if it has never waited."""
        waits = self._events_where(lambda row: row.waited)
        return max(waits, key=lambda event: event.waited or 0, default=None)

    @property
    def polls(self) -> bool:
        """Whether its wait is a loop that asks whether an operation is complete."""
        return self.waiting is not None and self.board.head.has(HeadBits.POLLED)

    @property
    def is_renumbered(self) -> bool:
        """Whether it has another number in its world than in the pool, so no peer is known."""
        return self.board.head.has(HeadBits.RENUMBERED)

    @property
    def is_crowded(self) -> bool:
        """Whether it has used more channels than can be counted, or waits for too old an event."""
        return self.board.head.has(HeadBits.CROWDED) or 0 <= self.board.head.waiting < self._older

    @property
    def unawaited(self) -> list[Event]:
        return self._events_where(
            # In a blocking call a thread was about to wait when the worker returned.
            lambda row: (
                not row.waited
                and not row.has(RowBits.LOOKED_AFTER)
                and not row.has(RowBits.VOID)
                and not row.has(RowBits.BLOCKING)
            )
        )

    def _events_where(self, condition: Callable[[Row], object]) -> list[Event]:
        """Return the events whose rows meet a condition, in the order of the calls."""
        found = []
        for place, values in enumerate(self.board.kept()):
            row = Row(*values)
            if row.what and condition(row):
                rounds = (self.board.head.events - 1 - place) // settings.EVENTS_KEPT
                found.append(self._event(place + rounds * settings.EVENTS_KEPT, row))
        return sorted(found, key=lambda event: event.index)

    @property
    def given_up(self) -> list[Event]:
        """The messages whose Work was dropped before anybody had waited for them."""
        return self._events_where(lambda row: row.has(RowBits.GIVEN_UP))

    @property
    def latest(self) -> int:
        """The latest time on the board, in nanoseconds; 0: there is none."""
        newest = max((max(row[-3:]) for row in self.board.kept()), default=0)
        return max(self.board.head.began, self.board.head.ended, newest)

    def counts(self) -> dict[tuple, tuple[int, int]]:
        """Return how many operations were posted, and how many of them were given up.

        By (kind, peer, tag, group): kind is "send", "recv", "any" or "collective". What was not
        used in this run is left out.
        """
        keys = self._counted[: self.board.head.counted]
        counts = ((key, self.board.count(slot)) for slot, key in enumerate(keys))
        return {key: (posted, given_up) for key, (posted, given_up) in counts if posted}

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
            given_up=row.has(RowBits.GIVEN_UP),
            blocking=row.has(RowBits.BLOCKING),
            **self._texts[row.what],
        )


class _Events(Sequence):
    """The events of several ranks, which are made when they are first needed."""

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
    """Return when each worker began and ended; one that was stopped, at the latest known time."""
    spans = [(snapshot.board.head.began, snapshot.board.head.ended) for snapshot in snapshots]
    if all(map(all, spans)):
        return tuple(spans)
    first = min((began for began, _ in spans if began), default=0)
    last = max((snapshot.latest for snapshot in snapshots), default=0)
    return tuple((began or first, ended or last) for began, ended in spans)
