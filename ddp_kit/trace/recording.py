"""Puts the recorder between a worker and PyTorch, without a change of the worker's code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, distributed_c10d

from ddp_kit.trace import calls, data_parallel
from ddp_kit.trace.board import Board
from ddp_kit.trace.calls import Call
from ddp_kit.trace.ledger import is_limit
from ddp_kit.trace.recorder import Recorder


@contextmanager
def recording(board: Board | None = None, run: int = 0) -> Iterator[Recorder]:
    """Record what this process communicates until the end of this block.

    board: where to write it. run: the pool's number of the run, which the board shows.
    """
    recorder = Recorder(board or Board(), run)
    with ExitStack() as put_back:
        for method in calls.METHODS:
            original = getattr(ProcessGroup, method)
            operation = _point_to_point if method in calls.POINT_TO_POINT else _collective
            replace(put_back, ProcessGroup, method, operation(recorder, method, original))
        replace(put_back, ProcessGroup, "monitored_barrier", _monitored_barrier(recorder))
        replace(put_back, distributed_c10d, "_new_group_with_tag", _new_group(recorder))
        replace(put_back, Work, "wait", _wait(recorder))
        replace(put_back, Work, "is_completed", _is_completed(recorder))
        replace(put_back, Work, "get_future", _get_future(recorder))
        data_parallel.record(put_back, replace, recorder)
        put_back.callback(recorder.stop)
        yield recorder


def replace(put_back: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Replace an attribute until `put_back` closes."""
    # What getattr gives is no method any more when it is put back; what stands in __dict__ is.
    put_back.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, new)


def _collective(recorder: Recorder, method: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def operation(group: ProcessGroup, *args: Any, **kwargs: Any) -> Work | None:
        call = calls.describe(method, (*args, *kwargs.values()))
        posted = recorder.post(group, call)
        try:
            work = original(group, *args, **kwargs)
        except BaseException:
            recorder.take_back(posted)
            raise
        recorder.track(work, posted)
        return work

    return operation


def _point_to_point(recorder: Recorder, method: str, original: Callable) -> Callable:
    def operation(group: ProcessGroup, *args: Any, **kwargs: Any) -> Work | None:
        given = (*args, *kwargs.values())
        *peer, tag = given[1:] if len(given) > 2 or method == "recv_anysource" else (given[1], 0)
        posted = recorder.post(group, calls.describe(method, given), *peer, tag=tag)
        try:
            work = original(group, *args, **kwargs)
        except BaseException:
            recorder.take_back(posted)
            raise
        recorder.track(work, posted)
        return work

    return operation


def _monitored_barrier(recorder: Recorder) -> Callable:
    original = ProcessGroup.monitored_barrier

    def monitored_barrier(group: ProcessGroup, *args: Any, **kwargs: Any) -> None:
        posted = recorder.post(group, Call("monitored_barrier"))
        limited = is_limit(*args, *kwargs.values())
        recorder.block(posted, limited, original, group, *args, **kwargs)

    return monitored_barrier


def _new_group(recorder: Recorder) -> Callable:
    original = distributed_c10d._new_group_with_tag

    def new_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        world = dist.group.WORLD
        members = tuple(range(dist.get_world_size()) if ranks is None else sorted(ranks))
        alone = kwargs.get("use_local_synchronization")
        if world is None or (alone and dist.get_rank() not in members):
            return original(ranks, *args, **kwargs)
        call = Call("new_group", inputs=((members, None),))
        posted = recorder.post(("new_group", members) if alone else world, call)
        return recorder.block(posted, False, original, ranks, *args, **kwargs)

    return new_group


def _wait(recorder: Recorder) -> Callable:
    @functools.wraps(Work.wait)
    def wait(work: Work, *args: Any, **kwargs: Any) -> bool:
        return recorder.wait(work, *args, **kwargs)

    return wait


def _is_completed(recorder: Recorder) -> Callable:
    original = Work.is_completed

    def is_completed(work: Work) -> bool:
        done = original(work)
        if done:
            recorder.look_after(work)
        return done

    return is_completed


def _get_future(recorder: Recorder) -> Callable:
    original = Work.get_future

    def get_future(work: Work) -> Any:
        future = original(work)
        recorder.follow(work, future)
        return future

    return get_future
