"""When the ranks of a run begin and end what they call, if every message takes one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ddp_kit.trace.events import Event, Trace

Key = tuple[int, int]  # (rank, index) of an event

CALL, START, WAIT = "call", "start", "wait"


@dataclass(frozen=True)
class Action:
    """A call of a rank, or its wait for what an earlier call has started.

    what: CALL, which returns when the operation is complete, as `send` does; START, which returns
    at once, as `isend` does; or WAIT, for an operation that was started. begin, end: steps from 0;
    they are equal if it takes no step.
    """

    event: Event
    what: str
    begin: int
    end: int


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank on one clock.

    actions: of each rank, in the order of its program. at: in which step each operation is
    carried out, by (rank, index). length: the number of steps.
    """

    actions: list[list[Action]]
    at: dict[Key, int]

    @property
    def length(self) -> int:
        ends = (action.end for own in self.actions for action in own)
        return max([0, *ends, *(step + 1 for step in self.at.values())])


def schedule(trace: Trace) -> Schedule:
    """Return when each rank begins and ends its operations, without times.

    A message and a collective take one step each, and computing takes none. A step begins when all
    of its ranks are there: so a `send` lasts until its receive has been posted and a `recv` until
    its send has, and a rank begins nothing else meanwhile. `isend`, `irecv` and collectives with
    `async_op=True` take no step to call; their `wait()` lasts until the step that carries them
    out is over. In each step there is one message at most from a rank to another one, and one
    collective at most on a rank. All begin as early as these conditions allow, so two runs of one
    program have the same schedule.

    If all ranks wait for each other although the run went on, then the sends among these calls
    were buffered: each takes one step for itself, and its receive a later one. If there is no such
    send, the earliest call on the lowest rank ends alone.
    """
    return _Ranks(trace).play()


class _Ranks:
    """Advances all ranks at once, each as far as the others allow."""

    def __init__(self, trace: Trace) -> None:
        self.queues: list[list[tuple[Event, str]]] = [[] for _ in range(trace.world_size)]
        self.actions: list[list[Action]] = [[] for _ in self.queues]
        self.now = [0] * trace.world_size  # the step that each rank has come to
        self.held: set[int] = set()  # ranks
        self.posted: dict[Key, int] = {}
        self.at: dict[Key, int] = {}
        self.parties: dict[Key, list[Event]] = {}  # of the message or collective
        self.used: dict[object, set[int]] = defaultdict(set)  # steps, by rank or (src, dst)
        found: list[list[tuple[tuple, Event, str]]] = [[] for _ in self.queues]
        for event in trace:
            own, index = found[event.rank], event.index
            own.append(((event.start, index, 0), event, CALL if event.blocking else START))
            if not event.blocking and event.waited is not None:
                own.append(((event.waited, index, 1), event, WAIT))
        for queue, own in zip(self.queues, found, strict=True):
            own.sort(key=lambda entry: entry[0])
            queue += [(event, what) for _, event, what in own]
        for message in trace.messages():
            self._join([message.send, *([message.recv] if message.recv else [])])
        for members in trace.collectives:
            self._join(members.values())

    def _join(self, events: Iterable[Event]) -> None:
        parties = list(events)
        self.parties |= {(event.rank, event.index): parties for event in parties}

    def play(self) -> Schedule:
        movable = list(reversed(range(len(self.queues))))
        while movable or self.held:
            if movable:
                movable += self._advance(movable.pop())
            else:
                movable = self._release()
        return Schedule(self.actions, self.at)

    def _advance(self, rank: int) -> list[int]:
        """Advance a rank until it must wait for another one; return who may go on because of it."""
        self.held.discard(rank)
        queue, actions, freed = self.queues[rank], self.actions[rank], []
        while len(actions) < len(queue):
            event, what = queue[len(actions)]
            key, begin = (rank, event.index), self.now[rank]
            if key not in self.posted:
                self.posted[key] = begin
                freed += self._carry_out(self.parties.get(key, [event]))
            if what == START:
                actions.append(Action(event, what, begin, begin))
                continue
            if key not in self.at:
                self.held.add(rank)
                break
            self.now[rank] = max(begin, self.at[key] + 1)
            actions.append(Action(event, what, begin, self.now[rank]))
        return [other for other in freed if other in self.held and other != rank]

    def _carry_out(self, parties: list[Event]) -> list[int]:
        """Carry out a message or collective if all of its ranks are there; return these."""
        keys = [(event.rank, event.index) for event in parties]
        if not all(key in self.posted for key in keys):
            return []
        step = max(self.posted[key] for key in keys)
        first = parties[0]
        busy: list[object] = [event.rank for event in parties]
        if first.kind != "collective":
            busy = [(first.rank, first.peer)] if len(parties) > 1 else []
            if keys[0] in self.at:  # its sender did not wait for the receive
                step = max(step, self.at[keys[0]] + 1)
        while any(step in self.used[who] for who in busy):
            step += 1
        for who in busy:
            self.used[who].add(step)
        for key in keys:
            self.at.setdefault(key, step)
        return [event.rank for event in parties]

    def _release(self) -> list[int]:
        """Let ranks go on that wait for each other in a circle; return them."""
        waits = [(self.now[rank], rank) for rank in self.held]
        events = {rank: self.queues[rank][len(self.actions[rank])][0] for _, rank in waits}
        sends = [
            rank for rank, event in events.items() if event.kind == "send" and not event.never_ended
        ]
        freed = sends or [min(waits)[1]]
        for rank in freed:
            key = rank, events[rank].index
            self.at[key] = self.posted[key]
        return freed
