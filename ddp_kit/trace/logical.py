"""The order in which the ranks of a run communicated, without times."""

from __future__ import annotations

import heapq
from collections import defaultdict

from ddp_kit.trace.events import Event, Trace

Key = tuple[int, int]  # (rank, index) of an event


def steps(trace: Trace) -> dict[Key, int]:
    """Return the logical step of every event, from 0: {(rank, index): step}.

    The steps of one rank increase in the order of its operations; a receive comes after the send
    that it took; the events of a collective share one step. Each step is the smallest that meets
    these conditions, so two runs of one program have the same steps (Lamport, "Time, Clocks, and
    the Ordering of Events in a Distributed System", 1978).

    A receive or collective counts from when its rank waited for it, not from when it was posted:
    in a ring, every rank posts its receive before its left neighbour has sent.

    If the ranks contradict each other (two collectives, waited for in opposite orders), no order
    meets all conditions. Then the order of each rank's own operations is kept, and the earliest
    event that is held up, on the lowest rank, goes ahead alone.
    """
    return _Order(trace).steps()


def _moment(event: Event) -> tuple[int, int]:
    waits = event.kind != "send" and event.waited is not None
    return event.waited if waits else event.start, event.index


class _Order:
    """Advances all ranks at once, each as far as the others allow."""

    def __init__(self, trace: Trace):
        self.queues: dict[int, list[Event]] = defaultdict(list)
        for event in trace:
            self.queues[event.rank].append(event)
        for queue in self.queues.values():
            queue.sort(key=_moment)
        self.at = dict.fromkeys(self.queues, 0)  # how many of its events a rank has passed
        self.next = dict.fromkeys(self.queues, 0)  # the step of its next event, if none is held up
        self.found: dict[Key, int] = {}
        self.send_of = {
            (m.recv.rank, m.recv.index): (m.send.rank, m.send.index)
            for m in trace.messages()
            if m.recv is not None
        }
        self.receiver = {send: recv[0] for recv, send in self.send_of.items()}
        self.collective_of: dict[Key, int] = {}  # which collective an event belongs to
        self.absent: list[set[int]] = []  # by collective: which ranks have not reached it yet
        for number, members in enumerate(trace.collectives):
            self.absent.append(set(members))
            self.collective_of.update(
                dict.fromkeys(((r, e.index) for r, e in members.items()), number)
            )
        self.together: list[set[int]] = [set() for _ in self.absent]
        self.movable = sorted(self.queues, reverse=True)
        self.held: list[tuple[int, int, int]] = []  # a heap: (step, rank, at)

    def steps(self) -> dict[Key, int]:
        while self.movable or self.held:
            if self.movable:
                self._advance(self.movable.pop())
                continue
            _, rank, at = heapq.heappop(self.held)
            if self.at[rank] == at:
                self._force(rank)
        return self.found

    def _advance(self, rank: int) -> None:
        """Advance a rank until one of its events must wait for another rank."""
        queue = self.queues[rank]
        while self.at[rank] < len(queue):
            key = rank, queue[self.at[rank]].index
            send, number = self.send_of.get(key), self.collective_of.get(key)
            if number is not None:
                self.absent[number].discard(rank)
                self.together[number].add(rank)
                if not self.absent[number]:
                    self._complete(number)
                    return
            elif send is None or send in self.found:
                self._pass(rank, self.found.get(send, -1) + 1)
                continue
            heapq.heappush(self.held, (self.next[rank], rank, self.at[rank]))
            return

    def _complete(self, number: int) -> None:
        """Let all ranks pass a collective that the last of them has reached."""
        members = self.together[number]
        step = max(self.next[rank] for rank in members)
        for rank in members:
            self._pass(rank, step)
        self.movable += members

    def _pass(self, rank: int, earliest: int) -> None:
        event = self.queues[rank][self.at[rank]]
        step = max(self.next[rank], earliest)
        self.found[rank, event.index] = step
        self.next[rank] = step + 1
        self.at[rank] += 1
        receiver = self.receiver.get((rank, event.index))
        if receiver is not None and receiver != rank:
            self.movable.append(receiver)

    def _force(self, rank: int) -> None:
        """Let a rank pass an event that another one holds up forever."""
        number = self.collective_of.get((rank, self.queues[rank][self.at[rank]].index))
        if number is not None:
            self.together[number].discard(rank)
        self._pass(rank, 0)
        self.movable.append(rank)
