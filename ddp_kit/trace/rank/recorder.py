"""Writes what this process communicates, waits in and has done on the board. Runs in a rank."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed import Work

from ddp_kit import torch_internals
from ddp_kit.error_text import Frame, Wait
from ddp_kit.trace.board import Board, HeadBits, RowBits
from ddp_kit.trace.calls import Call, CallSite, Count, InternTable, is_short
from ddp_kit.trace.events import format_call
from ddp_kit.trace.polling import Loop
from ddp_kit.trace.stacks import describe_line, find_caller, own_frame, write_handled

_MOST_THREADS = 1_000  # of a run whose names are written: the board has room for some texts
_OPEN = -1  # the sender of a message that may not have come yet
_WAITING = {"send", "recv", "send_object_list", "recv_object_list"}  # they wait for their message

_FORKED = (
    "a process that a rank has forked, such as a worker of a DataLoader, cannot communicate in the "
    "rank's process groups: make this call in the rank itself"
)

current: Recorder | None = None  # the recorder of the run in progress; None outside of a run
_forks = 0  # how many forks lie between this process and the rank


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def while_recorded(original: Callable, recorded: Callable) -> Callable:
    """Return a function that calls `recorded(recorder, original, ...)` while a run is recorded."""

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        recorder = current  # read once: another thread may end the run
        if recorder is None:
            return original(*args, **kwargs)
        return recorded(recorder, original, *args, **kwargs)

    return either


def own_line(frame: FrameType | None) -> Frame | None:
    """Return the learner's own line at `frame`, or at the nearest of its callers."""
    own = own_frame(frame)
    return own and describe_line(own.f_code.co_filename, own.f_lineno, own.f_code.co_name)


class Posted(NamedTuple):
    """An operation that was called and may not be complete yet."""

    index: int  # of its event
    site: CallSite

    def as_wait(self) -> Wait:
        """Return the operation as what a rank waits in; the rank is not known here."""
        site, call = self.site, self.site.call
        root = None if call.root is None else site.group.ranks[call.root]
        called = format_call(site.op, call.method, site.peer, site.tag, root)
        return Wait(0, called, site.line)


_UNKNOWN = None, None  # what a table has no entry for


class Recorder:
    """One run of one rank, on the board of `table`.

    broken: the id of the exception that was raised in a wait, and that wait.
    """

    def __init__(
        self, table: InternTable, run: int = 0, rank: int | None = None, store: str | None = None
    ) -> None:
        self.rank, self.store = rank, store
        self.broken: tuple[int, Wait] | None = None
        self.newest: Posted | None = None
        self.prefix = ""  # of the names of operations: who calls them, such as "DDP "
        self._hidden: set[int] = set()  # threads whose calls are part of a recorded one
        self.batching = False  # nccl starts the next operations as one, with one Work for all
        self.table, self.run = table, run
        self._board: Board | None = table.board  # None: the run is over
        self._thread, self._forks = threading.get_ident(), _forks
        self._lock = threading.RLock()  # the learner's threads may communicate too
        # Operations that may not be complete, by the id of their Work. A strong reference would
        # keep that alive: the recorder must not change what happens.
        self._started: dict[int, tuple[weakref.ref, Posted]] = {}
        # The collective that PyTorch itself waits for next, in the worker's own thread.
        self._awaited: tuple[Work | None, Posted | None] = _UNKNOWN
        # Receives from any source in the order of their calls, by tag and group: the index of each
        # event and who sent the message, _OPEN before its wait has ended.
        self._from_any: dict[Count, dict[int, int | None]] = {}
        self._followed: dict[int, tuple[weakref.ref, Posted]] = {}  # by the id of a future or Work
        self.polled: Posted | None = None  # the operation that a loop of the worker waits for
        self.loops: dict[tuple[str, int], Loop | None] = {}  # that may poll, by line
        self.no_wait_at: tuple[CodeType, int] | None = None  # a code and a place in it that polls
        self.key_waits = 0  # for keys of a store
        self._is_cut = False  # an operation has failed
        self._futures = 0  # that somebody holds, of operations that are not complete
        # To come or running, by the index of the event; None: of tasks in pools.
        self._callbacks: Counter[int | None] = Counter()
        self._dropped = self._threads = 0
        # Of a thread: the line that has started it, or its task.
        self.lines: dict[threading.Thread, Frame | None] = {}
        # What there is to say after the run, each a sentence and a line of the learner's.
        self.at_end: set[Callable[[int], tuple[str, Frame | None]]] = set()
        self.summed = 0  # the most numbers that the worker itself has summed in one call
        self.results: dict[int, Posted] = {}  # functional collectives, by their memory
        self._handles = False  # an exception, in the newest wait
        table.begin(run, monotonic_ns())

    @property
    def all_awaited(self) -> bool:
        """Whether nothing that was started can still be in flight, and no connection was cut."""
        # After a timeout gloo closes the connection, even if the exception is caught.
        if self._is_cut:
            return False
        left = [self._awaited[0], *(started() for started, _ in self._started.values())]
        # PyTorch's own method: its replacement would note that somebody has asked.
        done = all(w is None or inspect.unwrap(type(w).is_completed)(w) for w in left)
        return done and not (self._dropped or self._futures or self.results)

    def stop(self) -> None:
        """Leave the board to the next run, although a thread of this one may still wait."""
        with self._lock:
            if self._board is not None:
                for text, line in [tell(self.summed) for tell in self.at_end]:
                    if text:
                        self.table.note(text, line)
                self._board.end(monotonic_ns())
            self._board = None
            self.table.end()

    def begin_world(self, size: int, rank: int) -> None:
        """Note that the worker has formed a default process group of `size` ranks, as `rank`."""
        with self._lock:
            self._forks = _forks
            if self._board is not None:
                self.table.begin_world(size)
                if self.rank not in (None, rank):
                    self._board.write_state(HeadBits.RENUMBERED)

    def post(
        self,
        group: Any,
        call: Call | Callable[[], Call],
        peer: int | None = None,
        tag: int = 0,
        op: str = "",
        blocking: bool = False,
        facts: tuple = (),
    ) -> Posted | None:
        """Write that an operation is called.

        call: what it is called with, or a function that describes it, which is called once for
        equal `facts`. peer: rank in the group. op: the name to show; by default that of the
        function which the learner called. blocking: the call itself waits. Raises ValueError, as
        PyTorch does, for a rank that does not exist: a backend would wait for it forever. Raises
        RuntimeError in a process that the rank has forked.
        """
        start = monotonic_ns()
        me = threading.get_ident()
        if me in self._hidden:
            return None
        if self._forks != _forks and not isinstance(group, tuple):
            raise RuntimeError(_FORKED)  # it would wait for threads that it does not have
        frame, name, of_dtensor = find_caller(sys._getframe(2))
        code = frame and frame.f_code
        with self._lock:
            board = self._board
            if board is None:
                return None
            # The hash of code, and the number of its line, take longer than these.
            place = (id(code), frame.f_lasti) if frame else self._line_of_thread(me)
            called = op or self.prefix, name, of_dtensor, blocking
            key = group, facts or call, peer, tag, called, place
            site, _ = self.table.sites.get(key, _UNKNOWN)
            if site is None:
                call = call if isinstance(call, Call) else call()
                op = of_dtensor + (op or self.prefix + (name or call.method))
                line = own_line(frame) or self._line_of_thread(me)
                blocking = blocking or name in _WAITING
                site = self.table.site(group, call, peer, tag, op, line, blocking)
                self.table.sites[key] = site, code
            if site.summed > self.summed and not self.prefix:
                self.summed = site.summed
            sequence = site.count.posted
            site.count.posted = sequence + 1
            index = board.post(site.row, site.count.slot, sequence, start)
            if site.kind == "any":
                self._from_any.setdefault(site.count, {})[index] = _OPEN
        posted = self.newest = Posted(index, site)
        return posted

    def _line_of_thread(self, me: int) -> Frame | None:
        """Return the line that has started a thread other than the worker's own."""
        if me == self._thread:
            return None
        lines = dict(self.lines)  # other threads may add theirs
        return {thread.ident: started for thread, started in lines.items()}.get(me)

    def note_thread(self, thread: threading.Thread) -> None:
        """Write the name of a thread, and where it was started."""
        with self._lock:
            self._threads += 1
            if len(self.lines) > _MOST_THREADS:
                self.lines.pop(next(iter(list(self.lines)), None), None)
            if self._board is not None and self._threads <= _MOST_THREADS:
                self.table.thread(thread.ident or 0, thread.name, self.lines.get(thread))

    def show_progress(self, done: int | None, total: int | None, label: str = "") -> None:
        """Write how far a loop has come. None: there is no loop, or its length is unknown."""
        if (board := self._board) is not None:
            board.write_progress(done, total, label)

    def take_back(self, posted: Posted | None) -> None:
        """Write that an operation was not posted after all: its call raised."""
        with self._lock:
            if posted and self._board is not None:
                self._board.write_bit(posted.index, RowBits.VOID)
                self.table.change(posted.site.count, posted=-1)
                self._from_any.get(posted.site.count, {}).pop(posted.index, None)

    def start(
        self, posted: Posted | None, original: Callable, *args: Any, **kwargs: Any
    ) -> Work | None:
        """Call what starts an operation, and remember its Work until it is complete."""
        try:
            work = original(*args, **kwargs)
        except BaseException:
            self.take_back(posted)
            raise
        if work is None or posted is None:
            return work
        if self.batching:
            self.expect_no_wait(posted)
            return work
        is_collective = posted.site.kind == "collective"
        if is_collective and posted.site.blocking and threading.get_ident() == self._thread:
            self._awaited = work, posted
            return work
        # A message ends with its Work, sent or not, except on MPI. A collective goes on: the
        # backend keeps it in a queue.
        goes_on = is_collective or hasattr(work, "ends_alone")
        drop = functools.partial(self._drop, id(work), goes_on)
        self._started[id(work)] = weakref.ref(work, drop), posted
        return work

    def _drop(self, key: int, goes_on: bool, _: weakref.ref) -> None:
        """Note that the Work of an operation was deleted, perhaps before it was complete."""
        with self._lock:
            _, posted = self._started.pop(key, _UNKNOWN)
            if posted is not None:
                self._dropped += 1
                if self._board is not None and not goes_on:
                    self.table.change(posted.site.count, given_up=1)
                    self._board.write_bit(posted.index, RowBits.GIVEN_UP)
                    if posted.site.kind == "any":
                        self._place(posted, None)

    def wait(self, original: Callable, work: Work, *args: Any, **kwargs: Any) -> Any:
        """Wait for `work` as `original` does, and write the wait on the board."""
        awaited, posted = self._awaited
        if awaited is work:
            self._awaited = _UNKNOWN
        else:
            posted = self.operation_of(work)
        if posted is None:
            return original(work, *args, **kwargs)
        limited = bool(args or kwargs) and is_short(*args, *kwargs.values())
        done = self.block(posted, limited, original, work, *args, **kwargs)
        if posted.site.kind == "any" and id(work) in self._started:
            self._note_source(posted, work)
        self._started.pop(id(work), None)  # not before: a thread may be left in the wait
        return done

    def block(
        self, posted: Posted | None, limited: bool, blocking: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that may block, with the wait on the board meanwhile."""
        me = threading.get_ident()
        if posted is None or me in self._hidden:
            return blocking(*args, **kwargs)
        limited, shown = limited or posted.site.group.limited, me == self._thread
        if (board := self._board) is not None:
            error = sys.exc_info()[1]  # what hides it may be this very wait, in a `finally`
            if shown and (error is not None or self._handles):
                self._handles = error is not None
                board.write_handled(write_handled(error))
            board.begin_wait(posted.index, monotonic_ns(), limited, shown)
        end = 0
        try:
            done = blocking(*args, **kwargs)
            end = monotonic_ns()
            return done
        except BaseException as error:
            # Only its id: the exception's frames hold this recorder and the process group, which
            # would then live until a garbage collection, and end in the middle of another run.
            self.broken = id(error), posted.as_wait()
            self._is_cut |= posted.site.call.method != "key"
            raise
        finally:
            if (board := self._board) is not None:
                board.end_wait(posted.index, end, shown)

    def begin_wait(self, posted: Posted | None) -> Callable[[], None]:
        """Write that a wait in C++ code begins; return a function that writes its end."""
        shown = threading.get_ident() == self._thread
        if posted is not None and (board := self._board) is not None:
            board.begin_wait(posted.index, monotonic_ns(), posted.site.group.limited, shown)

        def end() -> None:
            if posted is not None and (board := self._board) is not None:
                board.end_wait(posted.index, monotonic_ns(), shown)

        return end

    def block_as_one(self, posted: Posted | None, blocking: Callable, *args: Any) -> Any:
        """Call a function that may block, as `block` does, and record nothing that it calls."""

        def alone() -> Any:
            own = {threading.get_ident()} - self._hidden
            self._hidden |= own
            try:
                return blocking(*args)
            finally:
                self._hidden -= own

        return self.block(posted, False, alone)

    def stand_still(self, blocking: Callable, *args: Any) -> Any:
        """Call a function that blocks until other threads go on, with that on the board."""
        board = self._board
        if board is None or threading.get_ident() != self._thread:
            return blocking(*args)
        board.write_state(HeadBits.JOINS)
        try:
            return blocking(*args)
        finally:
            if self._board is not None:
                board.write_state(HeadBits.JOINS, False)

    def begin_poll(self, posted: Posted) -> None:
        """Write that a loop of the worker does nothing but ask whether an operation is complete."""
        if (board := self._board) is not None:
            self.polled = posted
            limited = posted.site.group.limited
            board.begin_wait(posted.index, monotonic_ns(), limited, shown=True, polled=True)

    def look_after(self, work: Work) -> None:
        """Write that somebody has seen that `work` is complete."""
        if self.polled is not None and self.polled is self.operation_of(work):
            if (board := self._board) is not None:
                board.end_wait(self.polled.index, monotonic_ns(), shown=True)
            self.polled = None
        _, posted = self._started.pop(id(work), _UNKNOWN)
        if posted and self._board is not None:
            self._board.write_end(posted.index, monotonic_ns())
            self._board.write_bit(posted.index, RowBits.LOOKED_AFTER)
            if posted.site.kind == "any":
                self._note_source(posted, work)

    def expect_no_wait(self, posted: Posted | None) -> None:
        """Write that PyTorch itself has started an operation and will not wait for it."""
        if posted is not None and self._board is not None:
            self._board.write_bit(posted.index, RowBits.LOOKED_AFTER)

    def follow(self, work: Work, future: torch.futures.Future, wanted: bool) -> None:
        """Write that somebody can wait for `future` instead of `work`.

        wanted: whoever has it wants to know when the operation is complete.
        """
        posted = self.operation_of(work)
        started = self._started.pop(id(work), None)
        if posted is None:
            return
        self.remember(work, posted)
        self.remember(future, posted)
        if started is None or self._board is None:
            return
        if wanted:
            self._board.write_bit(posted.index, RowBits.LOOKED_AFTER)
        with self._lock:
            self._futures += 1
            if posted.site.kind == "any":
                self._place(posted, None)

        def complete(_: torch.futures.Future) -> None:
            with self._lock:
                self._futures -= 1
                if self._board is not None:
                    self._board.write_end(posted.index, monotonic_ns())

        inspect.unwrap(type(future).then)(future, complete)  # nobody has used it yet

    def count_callbacks(self, posted: Posted | None, change: int) -> None:
        """Write whether callbacks are left that run once an operation, or any task, is complete."""
        with self._lock:
            index = posted and posted.index
            self._callbacks[index] += change
            left = self._callbacks[index]
            if self._board is None:
                return
            if posted is None:
                self._board.write_state(HeadBits.TASKS, left > 0)
            else:
                self._board.write_callbacks(posted.index, left, posted.site.group.limited)

    def remember(self, waitable: Any, posted: Posted) -> None:
        """Remember that who waits for this Work or future waits for an operation."""
        key = id(waitable)
        reference = weakref.ref(waitable, lambda _: self._followed.pop(key, None))
        self._followed[key] = reference, posted

    def operation_of(self, waitable: Any) -> Posted | None:
        """Return the operation that a Work, or a future of it, waits for; None if it is unknown."""
        place = id(waitable)
        return (self._started.get(place) or self._followed.get(place) or _UNKNOWN)[1]

    def _note_source(self, posted: Posted, work: Work) -> None:
        """Write who sent a message that was received from any source."""
        sender = torch_internals.source_rank(work)
        with self._lock:
            if self._board is None:
                return
            self.table.change(posted.site.count, given_up=1)  # it is no longer open
            self._place(posted, None if sender is None else posted.site.group.ranks[sender])

    def _place(self, posted: Posted, source: int | None) -> None:
        """Give receives from any source their places among the messages of their senders.

        The messages of a sender fill them in the order of their calls. So one that ends has its
        place when all earlier ones have ended. source: None if it is unknown.
        """
        received = self._from_any[posted.site.count]
        if posted.index in received:
            received[posted.index] = source
        for index, source in list(received.items()):
            if source == _OPEN or self._board is None:
                return
            del received[index]
            if source is not None:
                count = self.table.count("recv", source, posted.site.tag, posted.site.group)
                self._board.write_source(index, source, self.table.change(count, posted=1))
