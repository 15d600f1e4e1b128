"""Traces made by hand: programs of ranks, played on a clock of their own."""

from __future__ import annotations

from dataclasses import replace

from ddp_kit.error_text import Frame
from ddp_kit.trace import Trace
from ddp_kit.trace.events import Event, Group

METHODS = {"all_reduce": "allreduce", "barrier": "barrier", "broadcast": "broadcast"}
MS = 1_000_000


class Script:
    """Ranks that communicate as scripted, one millisecond per operation."""

    def __init__(self, n: int):
        self.n, self.now, self.counts = n, [5 * MS] * n, {}
        self.world = Group("0", tuple(range(n)))
        self.events: list[list[Event]] = [[] for _ in range(n)]

    def compute(self, rank: int, ms: float) -> None:
        self.now[rank] += int(ms * MS)

    def add(self, rank: int, op: str, kind: str, took: float | None = 0, **given) -> Event:
        """Add an event that was called now and waited for `took` ms; None: forever."""
        group = given.setdefault("group", self.world)
        peer = given.get("peer")
        channel = (rank, peer) if kind == "send" else (peer, rank)
        key = (channel, kind, given.get("tag", 0)) if kind != "collective" else (rank, group)
        number = self.counts.get(key, 0)
        self.counts[key] = number + 1
        start = self.now[rank]
        end = None if took is None else start + int(took * MS)
        where = Frame("Cell In[1]", 3, "worker", f"dist.{op}(x)", True)
        times = {"start": start, "waited": start, "end": end, "blocking": "waited" not in given}
        given = {"nbytes": 4096, "dtype": "float32", "where": where, **times, **given}
        method = METHODS.get(op.removeprefix("DDP "), op)
        index = len(self.events[rank])
        event = Event(rank, index, op, kind, method, sequence=number, **given)
        self.events[rank].append(event)
        if end is not None:
            self.now[rank] = end + MS // 10
        return event

    def send(self, src: int, dst: int, took: float | None = 0.2, **given) -> None:
        self.add(src, "send", "send", took, peer=dst, inputs=((32, 32),), **given)

    def recv(self, src: int | None, dst: int, took: float | None = None, **given) -> None:
        if took is not None:
            took = max(took, (self.now[src] - self.now[dst]) / MS)
        self.add(dst, "recv", "recv", took, peer=src, outputs=((32, 32),), **given)

    def message(self, src: int, dst: int, **given) -> None:
        self.send(src, dst, **given)
        self.recv(src, dst, 0.3, **given)

    def collective(self, op: str, ranks=None, **given) -> None:
        ranks = range(self.n) if ranks is None else ranks
        over = max(self.now[rank] for rank in ranks) + MS
        for rank in ranks:
            self.add(rank, op, "collective", (over - self.now[rank]) / MS, **given)

    def trace(self, **given) -> Trace:
        over = max(self.now) + MS
        spans = tuple((4 * MS, max(over, now)) for now in self.now)
        events = tuple(event for events in self.events for event in events)
        return Trace(self.n, events, **{"spans": spans, **given})


def pipeline(n: int, batches: int = 2) -> Trace:
    """Each rank computes and sends to the next; then all join an all_reduce and a barrier."""
    script = Script(n)
    for _ in range(batches):
        script.compute(0, 1)
        for rank in range(n - 1):
            script.message(rank, rank + 1)
            script.compute(rank + 1, 1)
    script.collective("all_reduce")
    script.collective("barrier")
    return script.trace()


def ring(n: int, rounds: int) -> Trace:
    """Every rank posts its receive and its send, and only then waits: nothing is blocked."""
    script = Script(n)
    for _ in range(rounds):
        posted = []
        for rank in range(n):
            script.compute(rank, 0.5 + 0.1 * rank)
            give = {"waited": None, "end": None}
            posted.append(script.add(rank, "irecv", "recv", peer=(rank - 1) % n, **give))
            script.add(rank, "isend", "send", peer=(rank + 1) % n, **give)
        over = max(script.now) + MS // 2
        for rank, event in enumerate(posted):
            waited = script.now[rank] + 1000
            script.events[rank][event.index] = replace(event, waited=waited, end=over)
            script.now[rank] = over + 1000
    return script.trace()


def mixed(n: int, rounds: int) -> Trace:
    """A ring of messages and an all_reduce in every round, with one slow rank."""
    script = Script(n)
    for _ in range(rounds):
        for rank in range(n):
            script.compute(rank, 2 if rank == 1 else 0.7)
        for rank in range(n):
            script.send(rank, (rank + 1) % n)
        for rank in range(n):
            script.recv((rank - 1) % n, rank, 0.3)
        script.collective("all_reduce")
    return script.trace()


def broken(n: int) -> Trace:
    """A message that nobody takes, a receive to which nobody sends, a barrier without rank 0."""
    script = Script(n)
    script.message(0, n - 1)
    script.send(1, 0)
    script.recv(n - 1, 0)
    for rank in range(1, n):
        script.add(rank, "barrier", "collective", None)
    return script.trace()


def program(*ranks: str, slow: int | None = None) -> Trace:
    """Return the trace of ranks that make these calls, as in "isend 1 a, recv 2, wait a".

    A call with a name is a call that returns at once; `wait` has that name. "send 1 tag=7" has a
    tag; "stuck recv 1" never ends. slow: the rank whose calls take a thousand times as long.
    """
    world, events = Group("0", tuple(range(len(ranks)))), []
    for rank, calls in enumerate(ranks):
        own, named, counts, now = [], {}, {}, 5 * MS
        for call in filter(None, (part.strip() for part in calls.split(","))):
            now += MS * (1000 if rank == slow else 1)
            words = call.split()
            if words[0] == "wait":
                index = named.pop(words[1])
                own[index] = replace(own[index], waited=now, end=now + MS // 2)
                continue
            stuck = words[0] == "stuck"
            op, *given = words[stuck:]
            kind = {"send": "send", "recv": "recv"}.get(op.removeprefix("i"), "collective")
            peer = int(given.pop(0)) if kind != "collective" else None
            tags = [int(word[4:]) for word in given if word.startswith("tag=")]
            names = [word for word in given if not word.startswith("tag=")]
            key = kind, peer, *tags
            counts[key] = counts.get(key, -1) + 1
            times = {"start": now, "waited": now + 1000, "end": now + MS // 2}
            if names:
                named[names[0]] = len(own)
                times |= {"waited": None, "end": None}
            times |= {"end": None} if stuck else {}
            where = {"peer": peer, "tag": tags[0] if tags else 0, "sequence": counts[key]}
            method = METHODS.get(op, op.removeprefix("i"))
            event = Event(rank, len(own), op, kind, method, world, **where, **times)
            own.append(replace(event, blocking=not names))
        events += own
    last = max((t for e in events for t in (e.start, e.waited, e.end) if t), default=0)
    return Trace(len(ranks), tuple(events), spans=((4 * MS, last + MS),) * len(ranks))


TREE = ("recv 1, recv 2, recv 4", "send 0", "recv 3, send 0", "send 2", "send 0")
