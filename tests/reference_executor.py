"""A small machine that runs programs of sends, receives and collectives as gloo would.

It keeps queues: a message matches its receive because both are in a list. So it can check
`ddp_kit.verdict`, which only counts.

A program is a list of steps for each rank. A step is a tuple:

    ("send", dst, tag, group)    done when its receive has been posted
    ("recv", src, tag, group)    done when its message has been sent; src None: from any source
    ("collective", root, group)  done when all have joined; with a root, a broadcast: on gloo see
                                 `broadcast_on_gloo`, else done for other ranks when the root has
    ("isend", ...), ("irecv", ...), ("icollective", ...)    do not wait
    ("wait", n)                  for the nth operation started with an "i", if there are that many
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddp_kit.trace.events import Event, Group
from ddp_kit.verdict import RankState


@dataclass(eq=False)
class Operation:
    """An operation that a rank has posted."""

    event: Event
    done: bool = False
    took: tuple | None = None  # the channel of a completed receive from any source


class Machine:
    """Ranks that run a program one step at a time, in an order that the caller chooses."""

    def __init__(self, program: Sequence[Sequence[tuple]]) -> None:
        self.program = program
        ranks = range(len(program))
        self.next = [0 for _ in ranks]  # of each rank: its next step
        self.order: list[int] = []  # which ranks have made a step
        self.waits: list[Operation | None] = [None for _ in ranks]
        self.started: list[list[Operation]] = [[] for _ in ranks]
        self.open: list[Operation] = []  # sends and receives without a partner, oldest first
        self.joined: dict[tuple, dict[int, Operation]] = {}  # (group, sequence) → by rank
        self.sends: list[Counter] = [Counter() for _ in ranks]  # by channel
        self.recvs: list[Counter] = [Counter() for _ in ranks]
        self.collectives: list[Counter] = [Counter() for _ in ranks]  # by group

    def is_waiting(self, rank: int) -> bool:
        operation = self.waits[rank]
        return operation is not None and not operation.done

    def has_returned(self, rank: int) -> bool:
        return self.next[rank] == len(self.program[rank]) and not self.is_waiting(rank)

    def runnable(self) -> list[int]:
        """Return the ranks that can make a step now; if none can, nothing more will happen."""
        ranks = range(len(self.program))
        return [r for r in ranks if not self.is_waiting(r) and not self.has_returned(r)]

    def step(self, rank: int) -> None:
        """Let a rank make its next step."""
        name, *given = self.program[rank][self.next[rank]]
        self.next[rank] += 1
        self.order.append(rank)
        self.waits[rank] = None  # it has noticed that its wait is over
        if name == "wait":
            if given[0] < len(self.started[rank]):
                self.waits[rank] = self.started[rank][given[0]]
            return
        operation = self._post(rank, name, *given)
        if name.startswith("i"):
            self.started[rank].append(operation)
        else:
            self.waits[rank] = operation

    def _post(self, rank: int, name: str, *given) -> Operation:
        kind = name.removeprefix("i")
        if kind == "collective":
            root, group = given
            sequence = self.collectives[rank][group]
            self.collectives[rank][group] += 1
            op, method = ("all_reduce", "allreduce") if root is None else ("broadcast",) * 2
            operation = Operation(Event(rank, 0, op, kind, method, group, sequence, root=root))
            self._join(operation)
            return operation
        peer, tag, group = given
        event = Event(rank, 0, name, kind, kind, group, 0, peer=peer, tag=tag)
        if peer is not None:
            count = (self.sends if kind == "send" else self.recvs)[rank]
            sequence = count[event.channel]
            count[event.channel] += 1
            event = Event(rank, 0, name, kind, kind, group, sequence, peer=peer, tag=tag)
        operation = Operation(event)
        self._match(operation)
        return operation

    def _join(self, operation: Operation) -> None:
        event = operation.event
        members = self.joined.setdefault((event.group, event.sequence), {})
        members[event.rank] = operation
        for rank, other in members.items():
            other.done |= can_leave(other.event, rank, members)

    def _match(self, operation: Operation) -> None:
        # A receive that names its source gets the message before one from any source.
        partners = [other for other in self.open if fits(operation.event, other.event)]
        partner = min(partners, key=lambda other: other.event.peer is None, default=None)
        if partner is None:
            self.open.append(operation)
            return
        self.open.remove(partner)
        operation.done = partner.done = True
        ends = {one.event.kind: one.event for one in (operation, partner)}
        if ends["recv"].peer is None:
            operation.took = partner.took = ends["send"].channel
            self.recvs[ends["recv"].rank][ends["send"].channel] += 1

    def late(self) -> set[int]:
        """Return the ranks that may not have noticed yet that their wait is over."""
        return {rank for rank, one in enumerate(self.waits) if one is not None and one.done}

    def states(self, late: Collection[int] = ()) -> list[RankState]:
        """Return what the boards would show now if the `late` ranks have not noticed yet."""
        return [self._state(rank, rank in late) for rank in range(len(self.program))]

    def _state(self, rank: int, late: bool) -> RankState:
        status, wait = "running", None
        if late or self.is_waiting(rank):
            status, wait = "waiting", self.waits[rank]
        elif self.has_returned(rank):
            status = "returned"
        mine = [one.event for one in self.open if one.event.rank == rank]
        recvs = Counter(self.recvs[rank])
        if late and wait.took:
            recvs[wait.took] -= 1
            mine.append(wait.event)
        return RankState(
            rank,
            status,
            wait and wait.event,
            dict(self.sends[rank]),
            dict(recvs),
            Counter((e.tag, e.group) for e in mine if e.kind == "recv" and e.peer is None),
            dict(self.collectives[rank]),
        )

    def hopeless(self, late: Collection[int] = ()) -> set[int]:
        """Return the waiting ranks that can never continue, whatever the running ones might do.

        It tries every set of ranks: a set is hopeless if nobody outside can help anybody in it.
        Late ranks can continue, but not in a collective that one of the hopeless must join.
        """
        ranks = range(len(self.program))
        waiting = [rank for rank in ranks if self.is_waiting(rank)]
        returned = {rank for rank in ranks if self.has_returned(rank)} - set(late)
        found: set[int] = set()
        for size in range(1, len(waiting) + 1):
            for some in itertools.combinations(waiting, size):
                dead = returned.union(some)
                if all(self._no_help(rank, dead) for rank in some):
                    found.update(some)
        return found | {r for r in late if self.is_left_alone(r, found | returned)}

    def is_left_alone(self, rank: int, dead: set[int]) -> bool:
        """Return whether a rank is in a collective that only dead ranks have not joined."""
        away = self.away(self.waits[rank].event)
        return bool(away) and away <= dead and not self.waits[rank].event.group.backends

    def away(self, event: Event) -> set[int]:
        """Return the ranks that have not joined a collective; none for other events."""
        here = self.joined.get((event.group, event.sequence), {})
        return set(event.group.ranks) - set(here) if event.kind == "collective" else set()

    def _no_help(self, rank: int, dead: set[int]) -> bool:
        event = self.waits[rank].event
        if event.kind == "collective":
            away = self.away(event)
            if event.root is None or event.group.backends:
                return not can_leave(event, rank, set(event.group.ranks) - (away & dead))
            return away <= dead  # the verdict is careful: any rank that still joins may help
        if event.peer is not None:
            return event.peer in dead
        return all(r in dead for r in event.group.ranks if r != rank)


def run(program: Sequence[Sequence[tuple]]) -> Machine:
    """Run a program until nothing more can happen, the lowest rank first."""
    machine = Machine(program)
    while runnable := machine.runnable():
        machine.step(runnable[0])
    return machine


def can_leave(event: Event, rank: int, here: Collection[int]) -> bool:
    """Return whether a rank can leave a collective that these ranks have joined."""
    if event.root is not None and event.group.backends:
        return rank in broadcast_on_gloo(event.root, event.group.ranks, here)
    everyone = len(here) == len(event.group.ranks)
    return everyone or (event.root not in (None, rank) and event.root in here)


def broadcast_on_gloo(root: int, ranks: Sequence[int], here: Collection[int]) -> set[int]:
    """Return who can leave a broadcast that the ranks `here` have joined: gloo's broadcast.cc.

    Ranks are numbered from the root. In round i, those below 2**i send to those 2**i above them.
    A send ends when its receive has been posted, and a rank leaves when its sends have ended.
    """
    order = [ranks[(ranks.index(root) + n) % len(ranks)] for n in range(len(ranks))]
    served, sending = {root} & set(here), set()
    for bit in range(len(ranks).bit_length()):
        for sender in range(min(1 << bit, len(ranks) - (1 << bit))):
            src, dst = order[sender], order[sender + (1 << bit)]
            if src in served and dst in here:
                served.add(dst)
            else:
                sending.add(src)
    return served - sending


def fits(one: Event, other: Event) -> bool:
    """Return whether these are a send and a receive that match."""
    if {one.kind, other.kind} != {"send", "recv"}:
        return False
    send, recv = (one, other) if one.kind == "send" else (other, one)
    here = send.peer == recv.rank and recv.peer in (None, send.rank)
    return here and (send.tag, send.group) == (recv.tag, recv.group)


class Tape:
    """Choices read from bytes, so that Hypothesis can vary and shrink them; at its end, all 0."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def below(self, limit: int) -> int:
        return next(self._data, 0) % limit

    def one_of(self, some: Sequence):
        return some[self.below(len(some))]

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def some_of(self, ranks: Sequence[int], size: int) -> list[int]:
        left = list(ranks)
        return [left.pop(self.below(len(left))) for _ in range(size)]


def random_program(tape: Tape, backends: str = "") -> list[list[tuple]]:
    """Return a program that usually would end, and usually is damaged afterwards."""
    size = 2 + tape.below(4)
    world = Group("world", tuple(range(size)), backends)
    members = tape.some_of(world.ranks, 2 + tape.below(size - 1))
    some = Group("some", tuple(sorted(members)), backends)
    program: list[list[tuple]] = [[] for _ in world.ranks]
    owed: list[tuple[int, int]] = []  # (rank, n): waits that are still to come
    started = [0] * size

    def add(rank: int, name: str, *given, may_start: bool = True) -> None:
        if may_start and tape.chance(35):
            name = f"i{name}"
            owed.append((rank, started[rank]))
            started[rank] += 1
        program[rank].append((name, *given))

    for _ in range(1 + tape.below(6)):
        group = tape.one_of([world, some])
        if tape.chance(30):
            root = tape.one_of([None, None, tape.one_of(group.ranks)])
            for rank in group.ranks:
                add(rank, "collective", root, group)
        else:
            src, dst = tape.some_of(group.ranks, 2)
            tag, any_source = tape.one_of([0, 0, 1]), tape.chance(25)
            add(src, "send", dst, tag, group)
            add(dst, "recv", None if any_source else src, tag, group, may_start=not any_source)
        while owed and tape.chance(40):
            rank, n = owed.pop(tape.below(len(owed)))
            program[rank].append(("wait", n))
    for rank, n in owed:
        program[rank].append(("wait", n))
    for _ in range(tape.one_of([0, 0, 1, 1, 2, 3])):
        _damage(tape, tape.one_of(program))
    return program


def _damage(tape: Tape, steps: list[tuple]) -> None:
    if not steps:
        return
    at, how = tape.below(len(steps)), tape.below(6)
    name, *given = steps[at]
    if how == 0:
        del steps[at]
    elif how == 1:
        del steps[at:]  # return early
    elif how == 2:
        steps.insert(tape.below(len(steps)), steps.pop(at))
    elif how == 3:
        steps.insert(at, steps[at])  # one call too many
    elif name.endswith(("send", "recv")):
        peer, tag, group = given
        if how == 4:
            tag = 1 - tag
        elif name == "recv":
            peer = None
        steps[at] = (name, peer, tag, group)
