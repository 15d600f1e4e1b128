"""The order in which a run communicated, without its times."""

from __future__ import annotations

import heapq
from collections import defaultdict

from ddp_kit.trace.events import Event, Trace

Key = tuple[int, int]  # (rank, index) of an event


def steps(trace: Trace) -> dict[Key, int]:
    """Give every event its logical step, from 0: {(rank, index): step}.

    The steps of one rank rise in the order of its operations; a receive comes after the send
    that it took; the events of a collective share one step. Each step is the smallest that
    keeps to this, so two runs of one program have the same steps (Lamport, "Time, Clocks, and
    the Ordering of Events in a Distributed System", 1978).

    A receive or collective stands where its rank waited for it, not where it was posted: in a
    ring, every rank posts its receive before its left neighbour has sent.

    Where the ranks contradict each other (two collectives, waited for in opposite orders), no
    order keeps to all of it. Then the order of each rank's own operations is kept, and the
    earliest event that is held up, of the lowest rank, goes ahead alone.
    """
    return _Order(trace).steps()


def _moment(event: Event) -> tuple[int, int]:
    waits = event.kind != "send" and event.waited is not None
    return event.waited if waits else event.start, event.index


class _Order:
    """Walks along all ranks at once, each as far as the others let it."""

    def __init__(self, trace: Trace):
        self.queues: dict[int, list[Event]] = defaultdict(list)
        for event in trace:
            self.queues[event.rank].append(event)
        for queue in self.queues.values():
            queue.sort(key=_moment)
        self.at = dict.fromkeys(self.queues, 0)  # how many of its events a rank has behind it
        self.next = dict.fromkeys(self.queues, 0)  # the step of its next event, if nobody waits
        self.found: dict[Key, int] = {}
        self.send_of = {
            (m.recv.rank, m.recv.index): (m.send.rank, m.send.index)
            for m in trace.messages()
            if m.recv is not None
        }
        self.receiver = {send: recv[0] for recv, send in self.send_of.items()}
        self.collective_of: dict[Key, int] = {}  # which collective an event belongs to
        self.absent: list[set[int]] = []  # by collective: who has not come to it yet
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
        """Let a rank pass its events until one must wait for another rank."""
        queue = self.queues[rank]
        while self.at[rank] < len(queue):
            key = rank, queue[self.at[rank]].index
            send, number = self.send_of.get(key), self.collective_of.get(key)
            if number is not None:
                self.absent[number].discard(rank)
                self.together[number].add(rank)
                if not self.absent[number]:
                    self._meet(number)
                    return
            elif send is None or send in self.found:
                self._place(rank, self.found.get(send, -1) + 1)
                continue
            heapq.heappush(self.held, (self.next[rank], rank, self.at[rank]))
            return

    def _meet(self, number: int) -> None:
        members = self.together[number]
        step = max(self.next[rank] for rank in members)
        for rank in members:
            self._place(rank, step)
        self.movable += members

    def _place(self, rank: int, earliest: int) -> None:
        event = self.queues[rank][self.at[rank]]
        step = max(self.next[rank], earliest)
        self.found[rank, event.index] = step
        self.next[rank] = step + 1
        self.at[rank] += 1
        receiver = self.receiver.get((rank, event.index))
        if receiver is not None and receiver != rank:
            self.movable.append(receiver)

    def _force(self, rank: int) -> None:
        """Let a rank pass an event that another one holds up for ever."""
        number = self.collective_of.get((rank, self.queues[rank][self.at[rank]].index))
        if number is not None:
            self.together[number].discard(rank)
        self._place(rank, 0)
        self.movable.append(rank)
