"""Writes on the board what this process communicates and what it waits in. Runs in a rank."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed import Work, distributed_c10d

from ddp_kit.failures import Wait
from ddp_kit.trace.board import GIVEN_UP, LOOKED_AFTER, VOID, Board
from ddp_kit.trace.call_site import describe_line, is_own
from ddp_kit.trace.calls import Call, kind_of
from ddp_kit.trace.events import format_call
from ddp_kit.trace.intern_table import Count, InternTable, Members, is_limit

_C10D = distributed_c10d.__file__

current: Recorder | None = None  # of the run that is on; None: none is


class Posted(NamedTuple):
    """An operation that was called, until nobody needs to know of it any more."""

    index: int  # of its event
    op: str
    call: Call
    peer: int | None
    tag: int
    place: tuple[CodeType, int] | None  # the learner's own line
    members: Members
    count: Count

    def as_wait(self) -> Wait:
        """Describe it as what a rank waits in; the rank is not known here."""
        root = self.call.root
        if root is not None:
            root = self.members.ranks[root]
        place = self.place and (self.place[0].co_filename, self.place[1], self.place[0].co_name)
        said = format_call(self.op, self.call.method, self.peer, self.tag, root)
        return Wait(0, said, describe_line(*place) if place else None)


class Recorder:
    """One run of one rank, on its board.

    broken: the id of the exception that came out of a wait, and that wait.
    """

    def __init__(self, board: Board, run: int = 0) -> None:
        self.broken: tuple[int, Wait] | None = None
        self.newest: Posted | None = None
        self.prefix = ""  # what to put before the names of operations: who calls them
        self._hidden: set[int] = set()  # threads whose calls belong to one that is recorded
        self.batching = False  # nccl starts what is called now as one, with one Work for all
        self.board, self.run = board, run
        self._board: Board | None = board  # None: the run is over
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # the learner's threads may communicate too
        self._ledger = InternTable(board)
        self._started: dict[int, tuple[weakref.ref, Posted]] = {}  # by the id of a Work
        self._futures = 0  # that somebody holds, of operations which are not complete
        self._dropped = 0
        board.begin(run, monotonic_ns())

    @property
    def all_awaited(self) -> bool:
        """Nothing that was started could still be under way, and no connection was cut."""
        if self.broken:  # after a time-out gloo closes the connection, also if it was caught
            return False
        left = [reference() for reference, _ in self._started.values()]
        # As PyTorch has it: what is in its place would note that somebody has asked.
        done = all(w is None or inspect.unwrap(type(w).is_completed)(w) for w in left)
        return done and not self._dropped and not self._futures

    def stop(self) -> None:
        """Leave the board to the next run; a thread of this one may still be in a wait."""
        with self._lock:
            if self._board is not None:
                self._board.end(monotonic_ns())
            self._board = None
            self._ledger.forget_groups()

    def post(
        self, group: Any, call: Call, peer: int | None = None, tag: int = 0, op: str = ""
    ) -> Posted | None:
        """Write that an operation is called. peer: rank in the group; op: else found out.

        Raises ValueError for a rank that is not there; a backend would wait for it in vain.
        """
        start = monotonic_ns()
        if threading.get_ident() in self._hidden:
            return None
        caller, name = _caller(sys._getframe(2))
        op = op or self.prefix + (name or call.method)
        with self._lock:
            board = self._board
            if board is None:
                return None
            ledger, place = self._ledger, caller and (caller.f_code, caller.f_lineno)
            members = ledger.members(group)
            to = None if peer is None else members.rank(peer)
            count = ledger.count(kind_of(call.method), to, tag, members)
            index = board.add_row(
                ledger.call(op, members, call),
                ledger.line(*place) if place else 0,
                -1 if to is None else to,
                *(0, tag, ledger.change(count, posted=1), start, 0, 0),
            )
        self.newest = Posted(index, op, call, to, tag, place, members, count)
        return self.newest

    def show_progress(self, done: int | None, total: int | None) -> None:
        """Write how far a loop has come; None: there is no loop, or nobody knows its end."""
        board = self._board
        if board is not None:
            board.write_progress(done, total)

    def take_back(self, posted: Posted | None) -> None:
        """The call raised: nothing was posted after all."""
        with self._lock:
            if posted and self._board is not None:
                self._board.write_bits(posted.index, VOID)
                self._ledger.change(posted.count, posted=-1)

    def track(self, work: Work | None, posted: Posted | None) -> None:
        """Note what stands for an operation until it is complete."""
        if work is None or posted is None:
            return
        if self.batching:
            if self._board is not None:
                self._board.write_bits(posted.index, LOOKED_AFTER)
            return
        key = id(work)
        ends_alone = getattr(work, "ends_alone", False)  # MPI's messages are on their way

        def drop(_: weakref.ref) -> None:
            # Work that ends unawaited takes its message along, sent or not. A collective goes on:
            # the backend has it in a queue of its own.
            with self._lock:
                if self._started.pop(key, None):
                    self._dropped += 1
                    goes_on = ends_alone or kind_of(posted.call.method) == "collective"
                    if self._board is not None and not goes_on:
                        self._ledger.change(posted.count, given_up=1)
                        self._board.write_bits(posted.index, GIVEN_UP)

        # A strong reference would keep such work alive: the recorder must not change what happens.
        self._started[key] = weakref.ref(work, drop), posted

    def wait(self, original: Callable, work: Work, *args: Any, **kwargs: Any) -> Any:
        """Wait for `work` as `original` does, and say so on the board."""
        _, posted = self._started.get(id(work), (None, None))
        if posted is None:
            return original(work, *args, **kwargs)
        limited = is_limit(*args, *kwargs.values())
        done = self.block(posted, limited, original, work, *args, **kwargs)
        if posted.call.method == "recv_anysource":
            self._note_source(posted, work)
        self._started.pop(id(work), None)  # not before: a thread may be left in the wait
        return done

    def block(
        self, posted: Posted | None, limited: bool, blocking: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Call what may block, and say so on the board meanwhile."""
        if posted is None:
            return blocking(*args, **kwargs)
        limited = limited or posted.members.limited
        shown = threading.get_ident() == self._thread
        board = self._board
        if board is not None:
            board.begin_wait(posted.index, monotonic_ns(), limited, shown)
        end = 0
        try:
            done = blocking(*args, **kwargs)
            end = monotonic_ns()
            return done
        except BaseException as error:
            # Its id only: the exception's frames hold this recorder and the process group, which
            # would then live until Python collects garbage, and end in the middle of another run.
            self.broken = id(error), posted.as_wait()
            raise
        finally:
            board = self._board
            if board is not None:
                board.end_wait(posted.index, end, shown)

    def block_as_one(self, posted: Posted | None, blocking: Callable, *args: Any) -> Any:
        """Call what may block, as `block` does; what it calls in its turn is not recorded.

        PyTorch's C++ comes back to a process group that is written in Python.
        """
        own = {threading.get_ident()} - self._hidden
        self._hidden |= own
        try:
            return self.block(posted, False, blocking, *args)
        finally:
            self._hidden -= own

    def look_after(self, work: Work) -> None:
        """Note that somebody has seen that `work` is complete."""
        entry = self._started.pop(id(work), None)
        if entry and self._board is not None:
            self._board.write_end(entry[1].index, monotonic_ns())
            self._board.write_bits(entry[1].index, LOOKED_AFTER)

    def follow(self, work: Work, future: torch.futures.Future) -> None:
        """Note that somebody has `future` to wait for, instead of `work`."""
        entry = self._started.pop(id(work), None)
        if entry is None or self._board is None:
            return
        self._board.write_bits(entry[1].index, LOOKED_AFTER)
        self._futures += 1

        def complete(_: torch.futures.Future) -> None:
            with self._lock:
                self._futures -= 1
                if self._board is not None:
                    self._board.write_end(entry[1].index, monotonic_ns())

        future.then(complete)

    def _note_source(self, posted: Posted, work: Work) -> None:
        """A message from any source has come from one."""
        source = posted.members.ranks[work._source_rank()]
        with self._lock:
            if self._board is not None:
                count = self._ledger.count("recv", source, posted.tag, posted.members)
                place = self._ledger.change(count, posted=1)
                self._board.write_source(posted.index, source, place)
                self._ledger.change(posted.count, given_up=1)  # it is open no more


def _caller(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """Return the learner's own frame, and the function of `torch.distributed` that it called."""
    name = ""
    while frame is not None and not is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename == _C10D:
            name = frame.f_code.co_name
        frame = frame.f_back
    return frame, "" if name.startswith("_") else name
