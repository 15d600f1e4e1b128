"""An operation that a rank has called, and the learner's line that called it."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

from torch.distributed import all_reduce

from ddp_kit.error_text import Wait
from ddp_kit.trace.calls import Call, Count, GroupInfo
from ddp_kit.trace.events import format_call
from ddp_kit.trace.stacks import describe_line, is_own

C10D = sys.modules[all_reduce.__module__].__file__  # where PyTorch defines its collectives


class Posted(NamedTuple):
    """An operation that was called and may not be complete yet."""

    index: int  # of its event
    op: str
    call: Call
    peer: int | None
    tag: int
    line: tuple[CodeType, int] | None  # the learner's own
    group: GroupInfo
    count: Count

    def as_wait(self) -> Wait:
        """Return the operation as what a rank waits in; the rank is not known here."""
        root = None if self.call.root is None else self.group.ranks[self.call.root]
        called = format_call(self.op, self.call.method, self.peer, self.tag, root)
        if self.line is None:
            return Wait(0, called)
        code, number = self.line
        return Wait(0, called, describe_line(code.co_filename, number, code.co_name))


def find_caller(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """Return the learner's own frame and the function of `torch.distributed` that it called."""
    name = ""
    while frame is not None and not is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename == C10D:
            name = frame.f_code.co_name
        frame = frame.f_back
    return frame, "" if name.startswith("_") else name
