"""What a rank called, as texts that are written on the board once and read in another process.

Many events have the same call, line of code, group and channel. Each of these becomes a text with
a number, and an event holds the numbers. What `InternTable` writes, `read_texts` reads.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from linecache import getline
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ddp_kit import torch_internals
from ddp_kit.error_text import Frame
from ddp_kit.trace.board import Board, RowBits
from ddp_kit.trace.events import Group, format_call

_KINDS = {"send": "send", "recv": "recv", "recv_anysource": "any", "key": "key"}
_REDUCE_OPS = {
    hash(getattr(ReduceOp, name)): name
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    if hasattr(ReduceOp, name)
}
# What methods of ProcessGroup take. In place: their first argument is what they send, and there are
# no other tensors.
_IN_PLACE = {"send", "broadcast", "reduce", "allreduce", "allreduce_coalesced"}
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
_SPLITTING = {"alltoall_base", "all_to_all_single"}
_REDUCING = "reduce", "_reduce", "allreduce"  # how their names begin
# Who asks for less wants to see the time go by. PyTorch's own default is 30 minutes.
_SHORT = timedelta(minutes=25)
_STRIDED = torch.strided
_NO_GROUP = Group("", ())  # of an event whose group did not fit on the board


class Call(NamedTuple):
    """What the ranks of one operation must agree on. Two equal calls have equal hashes."""

    method: str
    root: int | None = None  # rank in the group
    reduce_op: str | None = None
    splits: tuple = ()
    inputs: tuple = ()  # (shape, dtype) of each tensor
    outputs: tuple = ()
    device: str = "cpu"  # of its first tensor
    strides: tuple[int, ...] = ()  # if gloo reads memory that is not contiguous as it lies there


def kind_of(method: str) -> str:
    """Return "send", "recv", "any" for a receive from any source, "key" or "collective"."""
    return _KINDS.get(method, "collective")


def is_short(*args: Any) -> bool:
    """Return whether one of the arguments is a timeout that the learner chose."""
    return any(isinstance(arg, timedelta) and timedelta(0) < arg < _SHORT for arg in args)


def flat(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a tensor, a list or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for inner in value for tensor in flat(inner)]


def describe(method: str, args: tuple) -> Call:
    """Return what the arguments of a method of ProcessGroup say."""
    inputs: list[torch.Tensor] = []  # a barrier has no tensors
    outputs: list[torch.Tensor] = []
    splits: tuple = ()
    if method.startswith("recv"):
        outputs = flat(args[0])
    elif method in _IN_PLACE:
        inputs = flat(args[0])
    elif len(args) > 1:
        inputs, outputs = flat(args[1]), flat(args[0])
    root = getattr(args[-1], "rootRank", None) if method in _ROOTED else None
    reduces = method.startswith(_REDUCING)
    reduce_op = _REDUCE_OPS.get(hash(getattr(args[-1], "reduceOp", None))) if reduces else None
    if method in _SPLITTING and len(args) > 3:
        rows_from, rows_to = args[2:4]
        splits = (tuple(rows_to), tuple(rows_from)) if len(rows_to) or len(rows_from) else ()
    sent, received = (tuple((t.shape, t.dtype) for t in side) for side in (inputs, outputs))
    device = next((tensor.device.type for tensor in flat(args)), "cpu")
    return Call(method, root, reduce_op, splits, sent, received, device)


def facts(method: str, args: Sequence[Any]) -> tuple:
    """Return what a method is called with; equal for calls that differ in numbers only.

    Unlike `describe`, it is called for each event.
    """
    found: list[Any] = [method]
    if method in _ROOTED:
        found.append(getattr(args[-1], "rootRank", None))
    if method.startswith(_REDUCING):
        found.append(hash(getattr(args[-1], "reduceOp", None)))
    if method in _SPLITTING:  # NumPy's integers and tensors of one are splits, too
        found += [tuple(map(operator.index, rows)) for rows in args[2:4]]
    for value in args:
        if type(value) is list and len(value) == 1:  # nearly always
            value = value[0]
        if isinstance(value, torch.Tensor):
            order = value.layout is _STRIDED and (value.is_contiguous() or value.stride())
            found.append((value.shape, value.dtype, value.is_cpu or value.device.type, order))
        elif isinstance(value, (list, tuple)):
            found.append(facts("", value))
    return tuple(found)


class GroupInfo(NamedTuple):
    """A process group as it is on the board."""

    number: int  # of its text
    ranks: tuple[int, ...]  # of the world
    limited: bool  # its operations fail after a timeout that the learner chose

    def rank(self, number: int) -> int:
        """Return the world's number of a rank of the group.

        Raises ValueError, as PyTorch does, if the group has no such rank.
        """
        if not 0 <= number < len(self.ranks):
            last = len(self.ranks) - 1
            raise ValueError(f"there is no rank {number}: the ranks of this group are 0 to {last}")
        return self.ranks[number]


class Count:
    """How many operations of one channel or group were posted and given up."""

    __slots__ = ("given_up", "posted", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.posted, self.given_up = slot, 0, 0


class CallSite(NamedTuple):
    """What all events of the same call in the same line have in common."""

    op: str
    call: Call
    kind: str  # see `kind_of`
    peer: int | None  # rank in the world
    tag: int
    line: Frame | None  # the learner's own
    group: GroupInfo
    count: Count
    blocking: bool  # the call itself waits, and returns no Work or future to wait for
    row: tuple[int, int, int, int, int]  # how their rows begin
    summed: int  # how many numbers it sums, if it does


class InternTable:
    """Writes texts and returns their numbers; 0: there is no room left for a text."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._forget()

    def _forget(self) -> None:
        # For the recorder. The code is one whose id is in the key: it must not end.
        self.sites: dict[tuple, tuple[CallSite, CodeType | None]] = {}
        self._groups: dict[Any, GroupInfo] = {}
        self._counts: dict[tuple, Count] = {}
        self._worlds: Counter[int] = Counter()  # that were formed, by their number of ranks
        self._world = ""  # what distinguishes the groups of the present world from earlier ones

    def begin(self, run: int, now: int) -> None:
        self.board.begin(run, now)
        self._forget()  # a recording inside another one begins without an end

    def begin_world(self, size: int) -> None:
        """Distinguish the groups of a world that was just formed from those of earlier ones.

        PyTorch names them alike. Worlds are counted by size, because a rank that is in one world
        may have skipped another one; all the ranks of a world have formed it.
        """
        self._worlds[size] += 1
        self._world = f" of world {self._worlds[size]} with {size} ranks"
        groups = self._groups.items()
        self._groups = {key: info for key, info in groups if not isinstance(key, tuple)}
        self.sites = {}

    def site(
        self,
        group: Any,
        call: Call,
        peer: int | None,
        tag: int,
        op: str,
        line: Frame | None,
        blocking: bool,
    ) -> CallSite:
        """Write a call of an operation in a line of code. peer: rank in the group.

        Raises ValueError, as PyTorch does, for a rank that does not exist.
        """
        info = self.group(group)
        to = None if peer is None else info.rank(peer)
        kind = kind_of(call.method)
        count = self.count(kind, to, tag, info)
        bits = blocking * RowBits.BLOCKING
        row = self.call(op, info, call), self.line(line), -1 if to is None else to, bits, tag
        sizes = [math.prod(shape) for shape, _ in call.inputs] if call.reduce_op else []
        summed = max(sizes, default=0)
        return CallSite(op, call, kind, to, tag, line, info, count, blocking, row, summed)

    def group(self, group: Any) -> GroupInfo:
        """Write a process group, or a name with ranks that wait for each other as a group does."""
        if (known := self._groups.get(group)) is not None:
            return known
        if isinstance(group, tuple):
            (name, ranks), limited, backends = group, False, ""
        else:
            name, ranks = group.group_name, dist.get_process_group_ranks(group)
            limited = torch_internals.group_timeout(group) < _SHORT
            backends = dist.get_backend_config(group)
        name += self._world
        number = self.board.add_text(["group", name, list(ranks), backends])
        self._groups[group] = GroupInfo(number, tuple(ranks), limited)
        return self._groups[group]

    def end(self) -> None:
        """Let go of process groups: whoever keeps one alive decides when its threads end."""
        self._groups, self.sites = {}, {}

    def line(self, line: Frame | None) -> int:
        """Write a line of code; return 0 for None."""
        if line is None:
            return 0
        text = ["line", line.file, line.line, line.function, line.source]
        return self.board.add_text(text)

    def call(self, op: str, group: GroupInfo, call: Call) -> int:
        root = None if call.root is None else group.rank(call.root)
        return self.board.add_text(["call", *_encode(op, group.number, root, call)])

    def count(self, kind: str, peer: int | None, tag: int, group: GroupInfo) -> Count:
        """Return the count of a channel, or of the collectives of a group."""
        key = kind, peer, tag, group.number
        count = self._counts.get(key)
        if count is None:
            # Without room on the board the pool cannot read it, but events need their sequence.
            count = self._counts[key] = Count(self.board.add_count(["count", *key]))
        return count

    def thread(self, ident: int, name: str, line: Frame | None) -> None:
        """Write the name of a thread, and the learner's line that has started it."""
        self.board.add_text(["thread", ident, name, self.line(line)])

    def note(self, sentence: str, line: Frame | None) -> None:
        """Write what is to be said after the run."""
        self.board.add_text(["note", sentence, self.line(line)])

    def change(self, count: Count, posted: int = 0, given_up: int = 0) -> int:
        """Count operations that were posted or given up; return how many were posted before."""
        before = count.posted
        count.posted = before + posted
        count.given_up += given_up
        self.board.write_count(count.slot, count.posted, count.given_up)
        return before


# The fields of an Event that the text of a call holds, in this order.
_FIELDS = (
    *("op", "kind", "method", "group", "root", "dtype"),
    *("inputs", "outputs", "splits", "reduce_op", "nbytes", "device", "strides"),
)


def _encode(op: str, group: int, root: int | None, call: Call) -> list:
    """Return a call as its text. root: in the world."""
    tensors = call.inputs or call.outputs
    dtype = str(tensors[0][1]).removeprefix("torch.") if tensors and tensors[0][1] else ""
    inputs, outputs = ([list(shape) for shape, _ in side] for side in (call.inputs, call.outputs))
    measured = call.outputs if call.method.startswith("recv") else call.inputs
    nbytes = sum(math.prod(shape) * kind.itemsize for shape, kind in measured if kind)
    what = [op, kind_of(call.method), call.method, group, root, dtype]
    return [*what, inputs, outputs, call.splits, call.reduce_op, nbytes, *call[-2:]]


def _decode(text: list) -> dict[str, Any]:
    """Return what the text of a call says, by the names of Event; the group is still a number."""
    call = dict(zip(_FIELDS, text, strict=True))
    call["kind"] = "recv" if call["kind"] == "any" else call["kind"]
    for name in ("inputs", "outputs", "splits"):
        call[name] = tuple(map(tuple, call[name]))
    call["strides"] = tuple(call["strides"])
    return call


@functools.lru_cache(maxsize=32)
def read_texts(texts: bytes) -> tuple[list[Any], list[tuple]]:
    """Return what each text of a board says, by its number, and the key of each count.

    A call becomes a dict by the names of Event. A key is (kind, peer, tag, group). The ranks of a
    run usually have the same texts, and so has the next run of the same worker.
    """
    read: list[Any] = [None]
    counted: list[tuple] = []
    for line in texts.splitlines():
        what, *text = json.loads(line)
        if what == "group":
            read.append(Group(text[0], tuple(text[1]), *text[2:]))
        elif what == "line":
            file, line, function, source = text
            source = source or getline(file, line).strip()  # of a cell, on another host
            read.append(Frame(file, line, function, source, own=True))
        elif what == "note":
            read.append(("note", text[0], read[text[1]]))
        elif what == "thread":
            ident, name, line = text
            read.append((ident, (name, read[line])))
        elif what == "count":
            kind, peer, tag, group = text
            counted.append((kind, peer, tag, read[group] or _NO_GROUP))
            read.append(None)
        else:
            call = _decode(text)
            read.append(call | {"group": read[call["group"]] or _NO_GROUP})
    return read, counted


@functools.lru_cache(maxsize=256)
def read_call(peer: int | None, tag: int, text: bytes) -> str:
    """Return a call as the learner wrote it, as in "recv(src=1)". text: as on the board."""
    call = _decode(json.loads(text)[1:])
    return format_call(call["op"], call["method"], peer, tag, call["root"])
