"""Records what this process sends, and says on the board what it waits in. Runs in a rank."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from ddp_kit.failures import Wait
from ddp_kit.trace.board import Board
from ddp_kit.trace.call_site import describe_line, is_own, own_frame
from ddp_kit.trace.events import Send

# What hands out a Work. `dist.send`, `dist.all_gather_object` and all the others end in one of
# these, however they were imported, so one wrapper around each sees them all.
_POINT_TO_POINT = ("send", "recv", "recv_anysource")
_COLLECTIVES = (
    *("broadcast", "reduce", "gather", "scatter", "barrier", "allgather", "_allgather_base"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    "_end_coalescing",
)
# Not every release of PyTorch has them all.
_STARTING = [n for n in _POINT_TO_POINT + _COLLECTIVES if hasattr(ProcessGroup, n)]
_C10D = dist.distributed_c10d.__file__
_PEERS = ("src", "dst", "group_src", "group_dst")


class Recorder:
    """What one run has sent so far, and the communication that it has started.

    sends: every point-to-point message, in order.
    broken: the exception that came out of a wait, and that wait.
    """

    def __init__(self, board: Board | None = None) -> None:
        self.sends: list[Send] = []
        self.broken: tuple[BaseException, Wait] | None = None
        self._board = board
        self._started: dict[int, tuple[weakref.ref, str]] = {}  # id of a Work → what started it
        self._dropped = 0

    @property
    def all_awaited(self) -> bool:
        """Nothing that was started could still be under way."""
        left = [reference() for reference, _ in self._started.values()]
        return not self._dropped and all(work is None or work.is_completed() for work in left)

    def start(self, name: str, work: Work | None) -> None:
        """Note what an operation of the process group has started."""
        if work is None:
            return
        key = id(work)

        def drop(_: weakref.ref) -> None:
            # Work that ends unawaited takes its operation along, done or not.
            if self._started.pop(key, None):
                self._dropped += 1

        # A strong reference would keep such work alive: the recorder must not mend a run.
        self._started[key] = weakref.ref(work, drop), _call(sys._getframe(2), name)

    def wait(self, work: Work, *args, **kwargs):
        """Wait for `work`, and say so on the board."""
        _, op = self._started.get(id(work), (None, "wait"))
        done = self.block(op, sys._getframe(2), _wait, work, *args, **kwargs)
        self._started.pop(id(work), None)  # not before: a thread may be left in the wait
        return done

    def stop(self) -> None:
        """Leave the board to the next run; a thread of this one may still be in a wait."""
        self._board = None

    def block(self, op: str, frame: FrameType | None, blocking, *args, **kwargs):
        """Call what may block, and say so on the board meanwhile."""
        caller = own_frame(frame)
        where = caller and describe_line(
            caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name
        )
        if self._board is not None:
            self._board.enter(op, where)
        try:
            return blocking(*args, **kwargs)
        except BaseException as error:
            self.broken = error, Wait(0, op, where)
            raise
        finally:
            if self._board is not None:
                self._board.leave()


_wait = Work.wait


@contextmanager
def recording(board: Board | None = None) -> Iterator[Recorder]:
    """Record what this process communicates until the end of this block.

    board: where to say what it waits in.
    """
    recorder = Recorder(board)
    originals = {name: getattr(ProcessGroup, name) for name in _STARTING}
    monitored_barrier = ProcessGroup.monitored_barrier
    # What getattr gives is no method any more when it is put back; what stands in __dict__ is.
    group_methods = {n: vars(ProcessGroup)[n] for n in [*_STARTING, "monitored_barrier"]}
    work_wait = vars(Work)["wait"]

    def wrap(name: str, original):
        def operation(group, *args, **kwargs):
            work = original(group, *args, **kwargs)
            recorder.start(name, work)
            return work

        return operation

    def send(group, tensors, dst, tag=0):
        work = originals["send"](group, tensors, dst, tag)
        src, to = _world_rank(group, group.rank()), _world_rank(group, dst)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        recorder.sends.append(Send(src, to, tag, nbytes, len(recorder.sends)))
        recorder.start("send", work)
        return work

    def barrier(group, *args, **kwargs):
        op, frame = "monitored_barrier", sys._getframe(1)
        return recorder.block(op, frame, monitored_barrier, group, *args, **kwargs)

    for name, original in originals.items():
        setattr(ProcessGroup, name, wrap(name, original))
    ProcessGroup.send, ProcessGroup.monitored_barrier = send, barrier
    Work.wait = lambda work, *args, **kwargs: recorder.wait(work, *args, **kwargs)
    try:
        yield recorder
    finally:
        recorder.stop()
        for name, method in group_methods.items():
            setattr(ProcessGroup, name, method)
        Work.wait = work_wait


def _call(frame: FrameType | None, name: str) -> str:
    """Return the call of `torch.distributed` that led here, as in "recv(src=1)"."""
    call = None
    while frame is not None and not is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename == _C10D:
            call = frame
        frame = frame.f_back
    if call is None:
        return name  # DDP and others call the process group themselves
    values = call.f_locals
    # torch fills in group_src from src; what was asked for stands first.
    shown = [f"{key}={values[key]}" for key in _PEERS if values.get(key) is not None][:1]
    if values.get("tag"):  # tag 0 is what everybody uses
        shown.append(f"tag={values['tag']}")
    return f"{call.f_code.co_name}({', '.join(shown)})" if shown else call.f_code.co_name


def _world_rank(group: ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)
