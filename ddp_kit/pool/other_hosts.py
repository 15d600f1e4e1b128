"""What the notebook knows of the ranks on other hosts; it reads it in torchrun's store.

Each of these ranks has an observer beside it (in `rank/torchrun_worker.py`), which writes there.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ddp_kit import settings
from ddp_kit.error_text import Frame, RankFailure, Wait, name_ranks
from ddp_kit.errors import KitError, PoolError, RankDiedError, RankError
from ddp_kit.pool import ipython
from ddp_kit.pool.result import Reports, rebuild
from ddp_kit.pool.wire import torchrun_store as wire
from ddp_kit.pool.wire.torchrun_store import RemoteReport, Sign, Silence, decode
from ddp_kit.trace import EMPTY, BoardCopy, Clock, Snapshot
from ddp_kit.trace.board import Head


class OtherHosts:
    """The ranks of other hosts.

    address, port: of torchrun's store. here: the number of ranks on each host. hosts: how many,
    with this one.

    boards: of these ranks, in their order. signs, ended: their last signs of life, and how they
    have ended, by rank.

    Raises PoolError if the store is unavailable.
    """

    def __init__(self, address: str, port: int, here: int, hosts: int) -> None:
        self._here, self._ranks = here, range(here, here * hosts)
        self.ended: dict[int, str] = {}
        self._reports: dict[int, RemoteReport] = {}
        self.signs: dict[int, Sign] = {}
        self._silences: dict[int, Silence] = {}
        self._agent_is_gone = False
        self._lost: tuple[float, list[int]] | None = None  # seconds, and ranks that were silent
        try:
            self._store = wire.connect(address, port, settings.STORE_ANSWERS_WITHIN)
        except RuntimeError as error:
            raise PoolError(
                f"torchrun's store at {address}:{port} does not answer: it has ended, or this "
                "host cannot reach its own address; set master_addr= to one that it can reach"
            ) from error
        self.boards: Sequence[RemoteBoard] = [RemoteBoard(self, rank) for rank in self._ranks]

    @property
    def unfinished(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self.ended]

    @property
    def returned(self) -> set[int]:
        return set(self._ended(wire.RETURNED))

    @property
    def failed(self) -> int:
        """How many ranks will not return; those of a lost host count as one."""
        ended = len(self.ended) - len(self.returned)
        return ended + (self._lost is not None) + (self._agent_is_gone and bool(self.unfinished))

    @property
    def failures(self) -> dict[int, RankFailure]:
        return self._failures(wire.RAISED) | self._failures(wire.CUT)

    def look(self) -> None:
        """Read what has come since the last call; call it several times a second."""
        try:
            self._read_ends()
            self._read_signs()
        except RuntimeError:  # what a store raises that is gone
            self._agent_is_gone = True
        most = settings.HOST_LOST_AFTER
        silent = [rank for rank in self.unfinished if self._silence(rank) > most]
        if silent and self._lost is None:
            self._lost = most, silent

    def _read_ends(self) -> None:
        text = self._store.get(wire.ENDS).decode() if self._store.check([wire.ENDS]) else ""
        for line in text.splitlines():
            rank, how = line.split()
            if int(rank) not in self.ended:
                if how in (wire.RETURNED, wire.RAISED, wire.CUT):
                    self._reports[int(rank)] = decode(self._store.get(f"report {rank}"))
                else:
                    log = self.board(int(rank)) or EMPTY
                    self._reports[int(rank)] = RemoteReport(log=log)
                self.ended[int(rank)] = how

    def _read_signs(self) -> None:
        there = self._store.check
        known = [n for n in self._ranks if n in self.signs or there([f"sign {n}"])]
        signs = self._store.multi_get([f"sign {rank}" for rank in known]) if known else []
        for rank, sign in zip(known, map(decode, signs), strict=True):
            heard = sign != self.signs.get(rank)
            self.signs[rank] = sign
            self._silences.setdefault(rank, Silence()).look(heard)

    def _silence(self, rank: int) -> float:
        return self._silences[rank].seconds if rank in self._silences else 0.0

    def board(self, rank: int) -> BoardCopy | None:
        try:
            if self._store.check([f"board {rank}"]):
                return decode(self._store.get(f"board {rank}"))
        except RuntimeError:
            self._agent_is_gone = True
        return None

    def ask_for_stacks(self, ranks: Sequence[int]) -> list[list[list[Frame]]] | None:
        """Return which lines ranks run; None if one has moved since it was judged, or is silent.

        No clocks are compared: a rank that has not moved for longer than it took to get the answer
        had not moved when the question was asked.
        """
        if not ranks:
            return []
        moves = {rank: sign.head.moves for rank, sign in self.signs.items()}
        try:
            asked = time.monotonic()
            question = self._store.add(wire.ASKED, 1)
            keys = [f"answer {question} {rank}" for rank in ranks]
            while not self._store.check(keys):
                if time.monotonic() > asked + settings.HOSTS_CONFIRM_WITHIN:
                    return None
                time.sleep(settings.SIGN_OF_LIFE_EVERY / 10)
            passed = time.monotonic() - asked
            answers = [decode(sent) for sent in self._store.multi_get(keys)]
        except RuntimeError:
            self._agent_is_gone = True
            return None
        for rank, answer in zip(ranks, answers, strict=True):
            if answer.moves != moves[rank] or answer.quiet < passed:
                return None
        return [answer.stacks for answer in answers]

    def value(self, rank: int) -> Any:
        """Return what a rank has returned. Raise PoolError if it cannot be rebuilt here."""
        return rebuild(rank, functools.partial(pickle.loads, self._reports[rank].value))

    def output(self) -> list[str]:
        return [self._report(rank).output for rank in self._ranks]

    def snapshots(self) -> list[Snapshot]:
        logs = {rank: report.log for rank, report in self._reports.items()}
        return [Snapshot(rank, log) for rank, log in sorted(logs.items())]

    def clock(self, rank: int) -> Clock | None:
        return self._report(rank).clock

    def waits(self) -> list[Wait]:
        boards = ((rank, self.boards[rank - self._here].read()) for rank in self.unfinished)
        return [Snapshot(rank, log).as_wait() for rank, log in boards]

    def _report(self, rank: int) -> RemoteReport:
        return self._reports.get(rank, RemoteReport())

    def release(self) -> None:
        """Let the ranks leave: everything they have reported has arrived."""
        self._store.set(wire.OVER, "")

    def find_reason(self, reports: Reports) -> None:
        """Wait a few seconds for what other hosts report, if ranks here have lost a connection."""
        if reports.died or reports.broken or not all(r.inside for r in reports.raised.values()):
            return
        deadline = time.monotonic() + settings.HOSTS_EXPLAIN_WITHIN
        while not self._has_reason and time.monotonic() < deadline:
            time.sleep(0.05)
            self.look()
        least = settings.CUT_HOST_LOST_AFTER
        silent = [rank for rank in self.unfinished if self._silence(rank) >= least]
        if silent and not self._has_reason:
            self._lost = least, silent

    @property
    def _has_reason(self) -> bool:
        return self._lost is not None or bool(
            {wire.RAISED, wire.DIED, wire.STOPPED} & set(self.ended.values())
        )

    def error(self, reports: Reports) -> KitError | None:
        """Return why the run failed; None if other hosts were not the reason.

        reports: those of this host's ranks.
        """
        if reports.died or reports.broken:
            return None
        raised = reports.raised.items()
        own = {rank: reply.failure for rank, reply in raised if not reply.inside}
        lost = [replace(reply.inside, rank=rank) for rank, reply in raised if reply.inside]
        waits, names = [*reports.stopped, *lost], ipython.cell_names()
        if failures := self._failures(wire.RAISED):
            return RankError(own | failures, waits, names)
        if own:
            return None
        died = [rank for cause in (wire.DIED, wire.TERMINATED) for rank in self._ended(cause)]
        if died:
            host = died[0] // self._here
            return RankDiedError(died[0], None, waits=waits, cell_names=names, host=host)
        if stopped := self._ended(wire.STOPPED):
            return PoolError(f"{self._name(stopped[:1])} has stopped: torchrun has ended there")
        if self._lost is not None:
            seconds, silent = self._lost
            return PoolError(
                f"{self._name(silent)} has not answered for {seconds:g} s: it was stopped, or the "
                "connection to it is lost"
            )
        if self._agent_is_gone and self.unfinished:
            return PoolError(
                f"torchrun has ended on this host before {name_ranks(self.unfinished)} on other "
                "hosts had returned; try again"
            )
        if (failures := self._failures(wire.CUT)) and not reports.raised:
            return RankError(failures, waits, names)
        return None

    def _failures(self, how: str) -> dict[int, RankFailure]:
        found = {rank: self._report(rank).failure for rank in self._ended(how)}
        return {rank: failure for rank, failure in found.items() if failure is not None}

    def _ended(self, how: str) -> list[int]:
        """Return the ranks that ended in this way, in the order in which they did."""
        return [rank for rank, ended in self.ended.items() if ended == how]

    def _name(self, ranks: Iterable[int]) -> str:
        """Return a host of these ranks in words, with all its ranks: "host 1 (ranks 2 and 3)"."""
        host = min(ranks) // self._here
        return f"host {host} ({name_ranks(range(host * self._here, (host + 1) * self._here))})"


class RemoteBoard:
    """The board of a rank, as far as its observer has shown it."""

    def __init__(self, hosts: OtherHosts, rank: int) -> None:
        self._hosts, self._rank = hosts, rank

    def head(self) -> Head:
        """Return the newest head; as long as its board is not shown, it moves all the time."""
        sign = self._hosts.signs.get(self._rank)
        if sign is None:
            return Head()
        return sign.head if sign.shown else sign.head._replace(moves=-sign.number, waiting=-1)

    def read(self) -> BoardCopy:
        """Return the board. A rank that moves has no events there, as if it did not wait."""
        head = self.head()
        if head.waits or head.ended:
            copy = self._hosts.board(self._rank)
            if copy is not None and copy.head == head:
                return copy
        return self.read_counts()

    def read_counts(self) -> BoardCopy:
        """Return nothing but the head, as of a rank that moves: what it has counted is unknown."""
        none = {"waiting": -1, "events": 0, "texts": 0, "counted": 0}
        return BoardCopy(self.head()._replace(**none), b"", b"", b"")
