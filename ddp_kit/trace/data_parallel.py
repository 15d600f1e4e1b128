"""Makes visible what DistributedDataParallel sends from inside PyTorch's C++ code.

DDP reduces its buckets itself, but lets a communication hook do it instead. So every model gets
a hook that does what DDP would have done. A hook that the learner registers takes the place of
that inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.trace.calls import Call, describe
from ddp_kit.trace.recorder import Recorder


class _Hook:
    """The communication hook of one model; `inside` is what it does with a bucket."""

    def __init__(self, recorder: Recorder, group: dist.ProcessGroup) -> None:
        self._recorder = recorder
        self._open: list[torch.futures.Future] = []
        self.registered = self.rebuilt = False
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.inside: Callable[[Any, Any], torch.futures.Future] = _average
        self.state: Any = group

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future:
        before, self._recorder.prefix = self._recorder.prefix, "DDP "
        try:
            future = self.inside(self.state, bucket)
        finally:
            self._recorder.prefix = before
        self._open.append(future)
        if bucket.is_last():
            self._wait()
        return future

    def _wait(self) -> None:
        """Wait where DDP would, in its C++ code, in a moment; here the board can tell."""
        futures, self._open = self._open, []
        with suppress(Exception):  # DDP itself waits again, and raises
            self._recorder.block(self._recorder.newest, False, torch.futures.wait_all, futures)


def _average(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future:
    """Do what DDP does without a hook, to the last bit: it multiplies and then sums."""
    gradients = bucket.buffer().mul_(1.0 / group.size())
    work = dist.all_reduce(gradients, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


_hooks: weakref.WeakKeyDictionary[Any, _Hook] = weakref.WeakKeyDictionary()  # by their Reducer
_register = dist._register_comm_hook


def _make_reducer(
    recorder: Recorder,
    original: Callable,
    model: DistributedDataParallel,
    *args: Any,
    **kwargs: Any,
) -> None:
    original(model, *args, **kwargs)
    hook = _hooks[model.reducer] = _Hook(recorder, model.process_group)
    _register(model.reducer, None, hook)


def _register_inside(
    _: Recorder, original: Callable, reducer: Any, state: Any, inside: Callable
) -> None:
    hook = _hooks.get(reducer)
    if hook is None or hook.registered:
        original(reducer, state, inside)  # which raises if there is one
    else:
        hook.state, hook.inside, hook.registered = state, inside, True


def _verify_params(
    recorder: Recorder, original: Callable, group: dist.ProcessGroup, *args: Any
) -> Any:
    posted = recorder.post(group, Call("_verify_params"), op="DistributedDataParallel")
    return recorder.block(posted, False, original, group, *args)


def _broadcast_coalesced(
    recorder: Recorder,
    original: Callable,
    group: dist.ProcessGroup,
    tensors: list,
    buffer_size: int,
    src: int = 0,
) -> None:
    call = describe("broadcast", (tensors,))._replace(root=src)
    posted = recorder.post(group, call, op="DDP broadcast")
    recorder.block(posted, False, original, group, tensors, buffer_size, src)


def _rebuild_buckets(recorder: Recorder, original: Callable, reducer: Any) -> bool:
    hook = _hooks.get(reducer)
    if hook is None or hook.rebuilt:
        return original(reducer)
    posted = recorder.post(("DDP", hook.ranks), Call("_rebuild_buckets"), op="DDP forward")
    hook.rebuilt = recorder.block(posted, False, original, reducer)
    if not hook.rebuilt:  # it did nothing; it is asked before every forward
        recorder.take_back(posted)
    return hook.rebuilt


# What is called instead of a function of PyTorch: whose it is, its name, the replacement.
RECORDED = (
    (dist.Reducer, "_rebuild_buckets", _rebuild_buckets),
    (DistributedDataParallel, "_ddp_init_helper", _make_reducer),
    (dist, "_register_comm_hook", _register_inside),
    (dist, "_verify_params_across_processes", _verify_params),
    (dist, "_broadcast_coalesced", _broadcast_coalesced),
)
