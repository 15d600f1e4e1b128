"""An operation that a rank has called, and the learner's line that called it."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch.distributed as dist

from ddp_kit.error_text import Wait
from ddp_kit.trace.calls import Call, Count, GroupInfo
from ddp_kit.trace.events import format_call
from ddp_kit.trace.stacks import describe_line, own_frame

C10D = sys.modules[dist.all_reduce.__module__].__file__  # where PyTorch defines its collectives
# What a learner calls of DTensor, and what calls collectives. It may not be imported yet.
_DTENSOR = os.path.join(os.path.dirname(dist.__file__), "tensor", "_api.py")
_OF_DTENSOR = {"distribute_tensor", "from_local", "full_tensor", "redistribute"}


Line = tuple[CodeType, int]


def own_line(frame: FrameType | None) -> Line | None:
    """Return the learner's own line at `frame`, or at the nearest of its callers."""
    own = own_frame(frame)
    return own and (own.f_code, own.f_lineno)


class Posted(NamedTuple):
    """An operation that was called and may not be complete yet."""

    index: int  # of its event
    op: str
    call: Call
    peer: int | None
    tag: int
    line: Line | None  # the learner's own
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


def find_caller(frame: FrameType | None) -> tuple[FrameType | None, str, str]:
    """Return the learner's own frame, and the function of `torch.distributed` that it called.

    The last value is a prefix: the function of DTensor that called it for the learner, as in
    "redistribute "; "" if there is none.
    """
    name, of_dtensor, own = "", "", own_frame(frame)
    while frame is not None and frame is not own:
        code = frame.f_code
        if code.co_filename == C10D:
            name = code.co_name
        elif code.co_name in _OF_DTENSOR and code.co_filename == _DTENSOR:
            of_dtensor = f"{code.co_name} "
        frame = frame.f_back
    return frame, "" if name.startswith("_") else name, of_dtensor
