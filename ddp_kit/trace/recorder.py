"""Writes on the board what this process communicates and what it waits in. Runs in a rank."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, distributed_c10d

from ddp_kit.failures import Wait
from ddp_kit.trace.board import LOOKED_AFTER, VOID, Board
from ddp_kit.trace.call_site import describe_line, is_own
from ddp_kit.trace.calls import Call, kind_of, nbytes
from ddp_kit.trace.events import say_call

_C10D = distributed_c10d.__file__
# Who asks for less wants to see the time go by. PyTorch's own default is 30 minutes.
_LIMIT = timedelta(minutes=25)


class _Group(NamedTuple):
    """A process group as the board has it."""

    number: int  # of its text
    ranks: tuple[int, ...]  # of the world
    limited: bool  # it gives up after a time that the learner chose


class _Count:
    """How many operations of one channel or group were posted and given up."""

    __slots__ = ("given_up", "posted", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.posted, self.given_up = slot, 0, 0


class Posted(NamedTuple):
    """An operation that was called, until nobody needs to know of it any more."""

    index: int  # of its event
    op: str
    call: Call
    peer: int | None
    tag: int
    place: tuple[CodeType, int] | None  # the learner's own line
    group: _Group | None
    count: _Count

    def as_wait(self) -> Wait:
        """Describe it as what a rank waits in; the rank is not known here."""
        root = self.call.root
        if root is not None and self.group:
            root = self.group.ranks[root]
        place = self.place and (self.place[0].co_filename, self.place[1], self.place[0].co_name)
        said = say_call(self.op, self.call.method, self.peer, self.tag, root)
        return Wait(0, said, describe_line(*place) if place else None)


class Recorder:
    """One run of one rank, on its board.

    broken: the id of the exception that came out of a wait, and that wait.
    """

    def __init__(self, board: Board, run: int = 0) -> None:
        self.broken: tuple[int, Wait] | None = None
        self.newest: Posted | None = None
        self.prefix = ""  # what to put before the names of operations: who calls them
        self._board: Board | None = board
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # the learner's threads may communicate too
        self._texts: dict[Any, int] = {}  # what was written, and its number
        self._codes: list[CodeType] = []
        self._groups: dict[Any, _Group] = {}
        self._counts: dict[tuple, _Count] = {}
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
        done = all(work is None or _is_completed(work) for work in left)
        return done and not self._dropped and not self._futures

    def stop(self) -> None:
        """Leave the board to the next run; a thread of this one may still be in a wait."""
        with self._lock:
            if self._board is not None:
                self._board.end(monotonic_ns())
            self._board = None
            self._groups.clear()

    def post(
        self, group: Any, call: Call, peer: int | None = None, tag: int = 0, op: str = ""
    ) -> Posted | None:
        """Write that an operation is called. peer: rank in the group; op: else found out."""
        start = monotonic_ns()
        caller, name = _caller(sys._getframe(2))
        op = op or self.prefix + (name or call.method)
        with self._lock:
            board = self._board
            if board is None:
                return None
            members = self._groups.get(group) or self._write_group(group)
            place, where = None, 0
            if caller is not None:
                place = caller.f_code, caller.f_lineno
                # The hash of code is slow, so its id stands for it; _write_line keeps it alive.
                where = self._texts.get((id(place[0]), place[1])) or self._write_line(place)
            what = self._texts.get((op, members.number, call))
            what = what or self._write_call(op, members, call)
            to = None if peer is None else members.ranks[peer]
            count = self._count(kind_of(call.method), to, tag, members)
            sequence = count.posted
            count.posted += 1
            board.write_count(count.slot, count.posted, count.given_up)
            number = -1 if to is None else to
            index = board.add_row(what, where, number, 0, tag, sequence, start, 0, 0)
        self.newest = Posted(index, op, call, to, tag, place, members, count)
        return self.newest

    def take_back(self, posted: Posted | None) -> None:
        """The call raised: nothing was posted after all."""
        with self._lock:
            if posted and self._board is not None:
                self._board.write_bits(posted.index, VOID)
                posted.count.posted -= 1
                self._write_count(posted.count)

    def track(self, work: Work | None, posted: Posted | None) -> None:
        """Note what stands for an operation until it is complete."""
        if work is None or posted is None:
            return
        key = id(work)

        def drop(_: weakref.ref) -> None:
            # Work that ends unawaited takes its operation along, done or not.
            with self._lock:
                if self._started.pop(key, None):
                    self._dropped += 1
                    posted.count.given_up += 1
                    self._write_count(posted.count)

        # A strong reference would keep such work alive: the recorder must not mend a run.
        self._started[key] = weakref.ref(work, drop), posted

    def wait(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        """Wait for `work`, and say so on the board."""
        _, posted = self._started.get(id(work), (None, None))
        if posted is None:
            return _wait(work, *args, **kwargs)
        done = self.block(posted, is_limit(*args, *kwargs.values()), _wait, work, *args, **kwargs)
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
        limited = limited or (posted.group is not None and posted.group.limited)
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
        assert posted.group is not None, "a receive has a group"
        source = posted.group.ranks[work._source_rank()]
        with self._lock:
            if self._board is not None:
                count = self._count("recv", source, posted.tag, posted.group)
                self._board.write_source(posted.index, source, count.posted)
                count.posted += 1
                posted.count.given_up += 1  # it is open no more
                self._write_count(count)
                self._write_count(posted.count)

    def _count(self, kind: str, peer: int | None, tag: int, group: _Group) -> _Count:
        key = kind, peer, tag, group.number
        count = self._counts.get(key)
        if count is None:
            assert self._board is not None, "only asked with a board"
            count = _Count(self._board.add_count(["count", *key]))
            if count.slot >= 0:
                self._counts[key] = count
        return count

    def _write_count(self, count: _Count) -> None:
        if self._board is not None:
            self._board.write_count(count.slot, count.posted, count.given_up)

    def _write(self, key: Any, text: list) -> int:
        """Write what events have in common, once; return its number, or 0."""
        assert self._board is not None, "only asked with a board"
        number = self._board.add_text(text)
        if number:
            self._texts[key] = number
        return number

    def _write_line(self, place: tuple[CodeType, int]) -> int:
        code, line = place
        frame = describe_line(code.co_filename, line, code.co_name)
        self._codes.append(code)
        text = ["line", frame.file, frame.line, frame.function, frame.source]
        return self._write((id(code), line), text)

    def _write_group(self, group: Any) -> _Group:
        if isinstance(group, tuple):  # a name and ranks: no process group, but they wait as one
            name, ranks, limited = *group, False
        else:
            name, ranks = group.group_name, dist.get_process_group_ranks(group)
            limited = _timeout(group) < _LIMIT
        number = self._write(("group", name, *ranks), ["group", name, ranks])
        self._groups[group] = _Group(number, tuple(ranks), limited)
        return self._groups[group]

    def _write_call(self, op: str, group: _Group, call: Call) -> int:
        root = None if call.root is None else group.ranks[call.root]
        tensors = call.inputs or call.outputs
        dtype = str(tensors[0][1]).removeprefix("torch.") if tensors and tensors[0][1] else ""
        shapes = [[list(shape) for shape, _ in side] for side in (call.inputs, call.outputs)]
        size = nbytes(call.outputs if call.method.startswith("recv") else call.inputs)
        text = ["call", op, kind_of(call.method), call.method, group.number, root, dtype]
        text += [*shapes, call.splits, call.reduce_op, size]
        return self._write((op, group.number, call), text)


_wait, _is_completed = Work.wait, Work.is_completed


def _caller(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """Return the learner's own frame, and the function of `torch.distributed` that it called."""
    name = ""
    while frame is not None and not is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename == _C10D:
            name = frame.f_code.co_name
        frame = frame.f_back
    return frame, "" if name.startswith("_") else name


def is_limit(*args: Any) -> bool:
    """Tell whether one of the arguments is a time that the learner chose to wait at most."""
    return any(isinstance(arg, timedelta) and timedelta(0) < arg < _LIMIT for arg in args)


def _timeout(group: ProcessGroup) -> timedelta:
    """Return after how long the operations of a group give up."""
    for device_type in group._device_types:
        options = getattr(group._get_backend(device_type), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return timedelta.max
