"""Puts the recorder between a worker and PyTorch, without changing the worker's code.

The functions of PyTorch are replaced once in a rank's process, for good: replacing them takes
longer than a short run. Outside of a run the replacements only call the originals.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing.pool
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from ddp_kit import torch_internals
from ddp_kit.torch_internals import C10D_MODULE, Feature, of_process_group
from ddp_kit.trace import collectives
from ddp_kit.trace.board import FORMING, SERVING, Board
from ddp_kit.trace.calls import Call, InternTable, describe, facts, is_short
from ddp_kit.trace.rank import data_parallel, functional, recorder, waits
from ddp_kit.trace.rank.gloo_limits import CPU_ONLY, memory_order, refuse_on_gpus
from ddp_kit.trace.rank.recorder import Recorder, while_recorded
from ddp_kit.trace.stacks import C10D, is_own

# All or none: with one side alone, each message would look as if nobody sent or received it.
MESSAGES = of_process_group(
    "messages between two ranks are not traced", "send", "recv", "recv_anysource"
)
MONITORED_BARRIER = of_process_group("monitored_barrier is not traced", "monitored_barrier")
BATCHES = of_process_group(
    "operations that nccl starts as one batch are reported as never waited for",
    *("_start_coalescing", "_end_coalescing"),
)
NEW_GROUPS = Feature("new_group is not traced", f"{C10D_MODULE}:_new_group_with_tag")
NEW_WORLDS = Feature(
    "calls in a world that is formed again in a run may be compared with calls in the one before",
    f"{C10D_MODULE}:_new_process_group_helper",
)
_FUTURE = torch.futures.Future.__bases__[0]  # of which get_future returns an instance


@contextmanager
def recording(
    table: InternTable | None = None,
    run: int = 0,
    rank: int | None = None,
    store: str | None = None,
) -> Iterator[Recorder]:
    """Record what this process communicates until the end of this block.

    table: of the board to write it on. None: on the board of the recording around this one, which
    begins anew, or on a new board. run: the pool's number of the run, which the board shows.
    rank: this process's in the pool. store: the path of the FileStore that only its ranks have.
    """
    _replace_all()
    before = recorder.current
    if table is None and before is not None:
        table, run, rank, store = before.table, before.run, before.rank, before.store
    own = recorder.current = Recorder(table or InternTable(Board()), run, rank, store)
    try:
        yield own
    finally:
        recorder.current = before
        own.stop()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing of what this process communicates in this block."""
    before, recorder.current = recorder.current, None
    try:
        yield
    finally:
        recorder.current = before


@functools.cache
def _replace_all() -> None:
    """Replace documented functions, and what this PyTorch has of each feature."""
    _replace(Work, "wait", Recorder.wait)
    _replace(Work, "is_completed", waits.poll)
    _replace(Work, "get_future", _get_future)
    for name in ("wait", "get"):
        _replace(dist.Store, name, functools.partial(waits.wait_for_keys, name))
    for name in ("value", "done"):
        _replace(_FUTURE, name, waits.use_future)
    _replace(_FUTURE, "wait", waits.wait_for_future)
    _replace(_FUTURE, "then", waits.follow_then)
    _replace(_FUTURE, "add_done_callback", waits.add_done_callback)
    _replace(torch.futures, "collect_all", waits.follow_all)
    _replace(torch.futures, "wait_all", waits.wait_for_all)
    _replace(threading.Thread, "join", waits.join)
    _replace(concurrent.futures.Future, "result", waits.result)
    _replace(concurrent.futures.Future, "add_done_callback", waits.add_task_callback)
    _replace(concurrent.futures.ThreadPoolExecutor, "submit", waits.submit)
    _replace(multiprocessing.pool.ApplyResult, "__init__", waits.begin_task)
    _replace(torch.autograd, "backward", data_parallel.note_backward)
    _replace(torch.autograd, "grad", data_parallel.note_grad)
    for feature, *replacements in (
        (MESSAGES, *(functools.partial(_point_to_point, method) for method in MESSAGES.found)),
        *(
            (feature, *(functools.partial(_collective, method) for method in feature.found))
            for feature in collectives.FEATURES.values()
        ),
        (MONITORED_BARRIER, _monitored_barrier),
        (BATCHES, _start_batch, _end_batch),
        (NEW_GROUPS, _new_group),
        (NEW_WORLDS, _new_process_group),
        (data_parallel.FEATURE, *data_parallel.REPLACEMENTS.values()),
    ):
        if feature.is_on:
            places = feature.found.items()
            for (name, (owner, _)), recorded in zip(places, replacements, strict=False):
                _replace(owner, name, recorded)
    functional.replace_kernels()


def _replace(owner: Any, name: str, recorded: Callable) -> None:
    """Call `recorded(recorder, original, ...)` instead of a function while a run is recorded.

    A backend that is written in Python has methods of its own; they are replaced as well.
    """
    below = _subclasses(owner) if isinstance(owner, type) else set()
    for place in [owner, *(cls for cls in below if name in vars(cls))]:
        either = while_recorded(getattr(place, name), recorded)
        if isinstance(owner, type):
            torch_internals.never_compile(either)
        setattr(place, name, either)


def _subclasses(cls: type) -> set[type]:
    return set(cls.__subclasses__()).union(*map(_subclasses, cls.__subclasses__()))


def _collective(
    method: str,
    recorder: Recorder,
    original: Callable,
    group: ProcessGroup,
    *args: Any,
    **kwargs: Any,
) -> Work | None:
    given = (*args, *kwargs.values())
    options = given[-1] if given else None
    posted = recorder.post(
        group,
        lambda: _describe(group, method, given),
        blocking=not getattr(options, "asyncOp", True),
        facts=facts(method, given),
    )
    return recorder.start(posted, original, group, *args, **kwargs)


def _describe(group: ProcessGroup, method: str, args: tuple) -> Call:
    """Return what a collective is called with. Raises an exception if gloo cannot do it."""
    if method in CPU_ONLY:
        refuse_on_gpus(group, method, args[1])
    return describe(method, args)._replace(strides=memory_order(group, method, args))


def _point_to_point(
    method: str,
    recorder: Recorder,
    original: Callable,
    group: ProcessGroup,
    *args: Any,
    **kwargs: Any,
) -> Work | None:
    given = (*args, *kwargs.values())
    *peer, tag = given[1:] if len(given) > 2 or method == "recv_anysource" else (given[1], 0)

    def describe_one() -> Call:
        refuse_on_gpus(group, method, given[0])
        # nccl can do so in a batch with the send. With gloo it would wait for ever.
        if method == "recv" and peer[0] == group.rank() and not given[0][0].is_cuda:
            raise ValueError("a rank cannot receive from itself: src is its own rank")
        return describe(method, given)

    called = facts(method, given[:1])
    posted = recorder.post(group, describe_one, *peer, tag=operator.index(tag), facts=called)
    return recorder.start(posted, original, group, *args, **kwargs)


def _start_batch(recorder: Recorder, original: Callable, *args: Any, **kwargs: Any) -> Any:
    started = original(*args, **kwargs)
    recorder.batching = True
    return started


def _end_batch(recorder: Recorder, original: Callable, *args: Any, **kwargs: Any) -> Work:
    recorder.batching = False
    return original(*args, **kwargs)


def _monitored_barrier(
    recorder: Recorder, original: Callable, group: ProcessGroup, *args: Any, **kwargs: Any
) -> None:
    posted = recorder.post(group, Call("monitored_barrier"), blocking=True)
    limited = is_short(*args, *kwargs.values())
    recorder.block(posted, limited, original, group, *args, **kwargs)


def _new_group(
    recorder: Recorder,
    original: Callable,
    ranks: list[int] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    world = dist.group.WORLD
    members = tuple(range(dist.get_world_size()) if ranks is None else sorted(ranks))
    # A group of one member connects nobody. Larger ones with the same number share their keys in
    # the store, so all ranks must agree on them.
    alone = kwargs.get("use_local_synchronization") or (len(members) == 1 and _divides_subgroup())
    if world is None or (alone and dist.get_rank() not in members):
        return original(ranks, *args, **kwargs)
    call = Call("new_group", inputs=((members, None),))
    posted = recorder.post(("new_group", members) if alone else world, call, blocking=True)
    return recorder.block(posted, False, original, ranks, *args, **kwargs)


def _divides_subgroup() -> bool:
    """Return whether new_subgroups divides a group that need not have all ranks."""
    frame = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        if (frame.f_code.co_filename, frame.f_code.co_name) == (C10D, "new_subgroups"):
            return frame.f_locals["group"] not in (None, dist.group.WORLD)
        frame = frame.f_back
    return False


def _new_process_group(
    recorder: Recorder,
    original: Callable,
    size: int,
    rank: int,
    members: list,
    *args: Any,
    **kwargs: Any,
) -> Any:
    recorder.table.board.write_phase(FORMING)
    try:
        made = original(size, rank, members, *args, **kwargs)
        if members:  # if the default group failed here, its name would stay taken
            torch_internals.wait_until_connected(made[0])
    finally:
        recorder.table.board.write_phase(SERVING)
    if not members:  # PyTorch passes none for the default group
        recorder.begin_world(made[0].size(), made[0].rank())
    return made


def _get_future(recorder: Recorder, original: Callable, work: Work) -> Any:
    future = original(work)
    # A coalesced call returns the future instead of the Work, and perhaps nobody uses it.
    recorder.follow(work, future, wanted=sys._getframe(2).f_code.co_filename != C10D)
    return future
