"""What stands on a board once, however many events have it: groups, calls, lines and counts."""

from __future__ import annotations

from datetime import timedelta
from types import CodeType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ddp_kit.trace.board import Board
from ddp_kit.trace.call_site import describe_line
from ddp_kit.trace.calls import Call, kind_of, nbytes

# Who asks for less wants to see the time go by. PyTorch's own default is 30 minutes.
_LIMIT = timedelta(minutes=25)


class Members(NamedTuple):
    """A process group as the board has it."""

    number: int  # of its text
    ranks: tuple[int, ...]  # of the world
    limited: bool  # it gives up after a time that the learner chose

    def rank(self, number: int) -> int:
        """Return the rank in the world of one of the group. Raises ValueError if there is none."""
        if not 0 <= number < len(self.ranks):
            last = len(self.ranks) - 1
            raise ValueError(f"there is no rank {number}: the ranks of this group are 0 to {last}")
        return self.ranks[number]


class Count:
    """How many operations of one channel or group were posted and given up."""

    __slots__ = ("given_up", "posted", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.posted, self.given_up = slot, 0, 0


class InternTable:
    """Writes each thing once, and remembers its number; 0: there is no room left."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._numbers: dict[Any, int] = {}  # of what was written
        self._codes: list[CodeType] = []
        self._members: dict[Any, Members] = {}
        self._counts: dict[tuple, Count] = {}

    def members(self, group: Any) -> Members:
        """Write a process group, or a name with ranks that wait for each other as a group does."""
        known = self._members.get(group)
        if known is not None:
            return known
        if isinstance(group, tuple):
            (name, ranks), limited = group, False
        else:
            name, ranks = group.group_name, dist.get_process_group_ranks(group)
            limited = _timeout(group) < _LIMIT
        number = self._write(("group", name, *ranks), ["group", name, list(ranks)])
        self._members[group] = Members(number, tuple(ranks), limited)
        return self._members[group]

    def forget_groups(self) -> None:
        """Let go of process groups: who keeps one alive decides when its threads end."""
        self._members.clear()

    def line(self, code: CodeType, line: int) -> int:
        """Write a line of code."""
        key = id(code), line  # the hash of code is slow; _codes keeps it alive
        known = self._numbers.get(key)
        if known:
            return known
        frame = describe_line(code.co_filename, line, code.co_name)
        self._codes.append(code)
        return self._write(key, ["line", frame.file, frame.line, frame.function, frame.source])

    def call(self, op: str, members: Members, call: Call) -> int:
        """Write what an operation was called with."""
        key = op, members.number, call
        known = self._numbers.get(key)
        if known:
            return known
        root = None if call.root is None else members.rank(call.root)
        tensors = call.inputs or call.outputs
        dtype = str(tensors[0][1]).removeprefix("torch.") if tensors and tensors[0][1] else ""
        shapes = [[list(shape) for shape, _ in side] for side in (call.inputs, call.outputs)]
        size = nbytes(call.outputs if call.method.startswith("recv") else call.inputs)
        text = ["call", op, kind_of(call.method), call.method, members.number, root, dtype]
        return self._write(key, [*text, *shapes, call.splits, call.reduce_op, size, call.device])

    def count(self, kind: str, peer: int | None, tag: int, members: Members) -> Count:
        """Return the count of a channel, or of the collectives of a group."""
        key = kind, peer, tag, members.number
        count = self._counts.get(key)
        if count is None:
            # Where the board has no room, the pool cannot read it; events still need the place.
            count = self._counts[key] = Count(self._board.add_count(["count", *key]))
        return count

    def change(self, count: Count, posted: int = 0, given_up: int = 0) -> int:
        """Count operations that were posted or given up; return how many were posted before."""
        before = count.posted
        count.posted += posted
        count.given_up += given_up
        self._board.write_count(count.slot, count.posted, count.given_up)
        return before

    def _write(self, key: Any, text: list) -> int:
        number = self._board.add_text(text)
        if number:
            self._numbers[key] = number
        return number


def is_limit(*args: Any) -> bool:
    """Tell whether one of the arguments is a time that the learner chose to wait at most."""
    return any(isinstance(arg, timedelta) and timedelta(0) < arg < _LIMIT for arg in args)


def _timeout(group: ProcessGroup) -> timedelta:
    """Return after how long the operations of a group give up."""
    if isinstance(getattr(group, "timeout", None), timedelta):
        return group.timeout  # it is written in Python
    for device_type in group._device_types:
        options = getattr(group._get_backend(device_type), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return timedelta.max
