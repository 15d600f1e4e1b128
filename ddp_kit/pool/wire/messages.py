"""What the notebook's process and a rank agree on: the messages of the control pipe, and names.

The messages are tuples, which are pickled and unpickled in half the time of other objects.

What a rank captures for `%ranks debug` is pickled without any code or class of the learner's: a
`Summary` stands for everything that is not plain data.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ddp_kit.error_text import RankFailure, Wait
from ddp_kit.pool.wire.pickling import Payload

# An environment variable that a rank and everything it starts inherit, to find them by.
RANK_MARK = "DDP_KIT_RANK"

# The first thing that a process started by mpiexec or torchrun sends to the pool's socket: rank,
# process id.
CALL = struct.Struct("=QQ")
SOCKET = "DDP_KIT_SOCKET"  # the environment variable that names this socket under torchrun

serving = False  # True in a rank's process, where no pool may be started

FileStamp = tuple[int, int]  # modification time in nanoseconds, size in bytes

# What a rank has displayed: IPython's representations of a value by MIME type, such as text, HTML
# and PNG, and their metadata.
Bundle = tuple[dict[str, Any], dict[str, Any]]


def file_stamp(path: str) -> FileStamp | None:
    """Return what distinguishes this version of a file from others; None if it is unreadable."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Environment(NamedTuple):
    """What a rank takes over from the notebook's process before each run."""

    path: tuple[str, ...]  # sys.path
    folder: str  # the working directory
    argv: tuple[str, ...]  # sys.argv
    variables: dict[str, str]  # os.environ
    in_notebook: bool  # which shows what a rank displays
    is_live: bool  # a view shows bars while the run lasts


class JoinGroup(NamedTuple):
    """To a rank: leave your process group and join this one."""

    rank: int
    world_size: int
    backend: str
    store: str | None  # the file of the FileStore; None: the worker forms its own group


class CallWorker(NamedTuple):
    """To a rank: call this worker."""

    payload: Payload  # (worker, args)
    cells: dict[str, str]  # cells this rank has not seen yet: file name → source
    environment: Environment | None  # None: unchanged since the previous run
    number: int  # of the run in its pool


class RankStatus(NamedTuple):
    """The state of a rank's process after it has handled a message."""

    modules: dict[str, FileStamp]  # the learner's files that it has imported since the last one
    group_intact: bool = True  # the process group is unchanged and nothing is in flight in it
    thread: str | None = None  # a thread that still runs the worker's code, so it needs an end


class Joined(NamedTuple):
    """From a rank: it is in the group."""

    status: RankStatus


class Returned(NamedTuple):
    """From a rank: the worker returned."""

    payload: Payload
    status: RankStatus
    displayed: Sequence[Bundle] = ()


class Raised(NamedTuple):
    """From a rank: joining the group, or the worker, raised."""

    failure: RankFailure
    status: RankStatus
    inside: Wait | None = None  # the wait that raised it
    displayed: Sequence[Bundle] = ()
    captured: bytes = b""  # a pickled Captured of the learner's functions; b"": there is none


class KitFailed(NamedTuple):
    """From a rank: the kit's own code raised; the process ends."""

    traceback: str
    status: RankStatus = RankStatus({}, group_intact=False)


# --- what a rank captures of the functions in which it raised --------------------------------

_SHOWN_ATTRIBUTES = 10
_LONGEST_ATTRIBUTE = 80  # characters


class FrameCopy(NamedTuple):
    """A function of the learner's as it was when the exception passed through it."""

    file: str
    line: int
    first_line: int  # where its definition begins
    function: str
    locals: dict[str, Any]  # its arguments first
    globals: dict[str, Any]  # those that it uses


class Captured(NamedTuple):
    """All that was captured of an exception. from_gpu: some tensors are CPU copies."""

    frames: tuple[FrameCopy, ...]
    from_gpu: bool


class TensorCopy:
    """A small tensor on its way; when it is unpickled, it is a tensor again, on the CPU."""

    def __init__(self, tensor: torch.Tensor, grad: TensorCopy | None) -> None:
        # A clone, because of a view the whole memory would be pickled.
        copy = tensor.detach().cpu().resolve_conj().resolve_neg().clone()
        if type(tensor) is torch.nn.Parameter:
            copy = torch.nn.Parameter(copy, tensor.requires_grad)
        self._parts = copy.requires_grad_(tensor.requires_grad), grad

    def __reduce__(self) -> tuple:
        return _with_gradient, self._parts


def _with_gradient(tensor: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    tensor.grad = grad  # which PyTorch does not pickle
    return tensor


class Known(NamedTuple):
    """What is known of a value that was too large to be captured, or is not plain data.

    kind: the name of its type, or "module", "function" or "class". note: more, as text. attributes:
    those that were captured. begin: the first of its items.
    """

    kind: str
    note: str
    attributes: dict[str, Any]
    begin: Any


class Summary:
    """Stands for such a value in an expression. Its attributes are those that were captured."""

    __slots__ = ("_known",)

    def __init__(
        self, kind: str, note: str = "", attributes: dict[str, Any] | None = None, begin: Any = None
    ) -> None:
        self._known = Known(kind, note, attributes or {}, begin)

    def __reduce__(self) -> tuple:
        return Summary, tuple(self._known)

    def __repr__(self) -> str:
        kind, note, attributes, begin = self._known
        text = f"{kind} {note}".rstrip()
        if begin is not None:
            return f"<{text}: {begin!r} ...>"
        if note or not attributes:
            return f"<{text}>"
        shown = [
            f"{name}={shorten(repr(value), _LONGEST_ATTRIBUTE)}"
            for name, value in list(attributes.items())[:_SHOWN_ATTRIBUTES]
        ]
        more = ["..."] if len(attributes) > _SHOWN_ATTRIBUTES else []
        return f"<{text}: {', '.join(shown + more)}>"

    def __getattr__(self, name: str) -> Any:
        if name in self._known.attributes:
            return self._known.attributes[name]
        raise AttributeError(f"no attribute {name!r} of this {self._known.kind} was captured")

    def __dir__(self) -> list[str]:
        return sorted(self._known.attributes)

    def _refuse(self, *_: object) -> Any:
        raise TypeError(
            f"only a summary of this {self._known.kind} was captured; tensors, numbers, text, and "
            "lists and dicts of them are captured whole up to 1 MB a function"
        )

    # Without these, an expression would be about the summary and not about the value.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = _refuse
    __iter__ = __getitem__ = __contains__ = __call__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __pow__ = _refuse
    __hash__ = object.__hash__


def known(summary: Summary) -> Known:
    """Return what a summary knows; its own attributes are those of the value."""
    return summary._known


def shorten(text: str, longest: int) -> str:
    """Return a text on one line, without its middle if it is longer than `longest` characters."""
    text = " ".join(text.split())
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"
