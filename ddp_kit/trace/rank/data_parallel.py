"""Records what DistributedDataParallel sends from inside PyTorch's C++ code.

DDP reduces its buckets itself, or lets a communication hook do it. So every model gets a hook
that does what DDP would have done. If the learner registers a hook, this one calls that instead.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.error_text import Frame
from ddp_kit.torch_internals import Feature
from ddp_kit.trace.calls import Call, describe
from ddp_kit.trace.collectives import method_of
from ddp_kit.trace.rank import recorder
from ddp_kit.trace.rank.recorder import Posted, Recorder, own_line


class _Wrapped:
    """A model that DDP has wrapped, and those of its parameters that have had gradients."""

    def __init__(self, model: DistributedDataParallel, parameters: list[torch.Tensor]) -> None:
        self.line, self._ddp = own_line(sys._getframe(2)), weakref.ref(model)
        self.is_reduced = self._is_frozen = False
        self._given = set(map(id, parameters))  # to the reducer, which keeps them alive
        self._ignored = set(model.parameters_to_ignore)
        # By their names: how many numbers each has, and whether the reducer has it.
        self._trained: dict[str, tuple[int, bool]] = {}

    def note(self, recorder: Recorder, model: torch.nn.Module, has_gradient: Callable) -> None:
        """Note which parameters have gradients after a backward pass."""
        ddp = self._ddp()
        if ddp is not None and not ddp.require_backward_grad_sync:
            return  # no_sync: perhaps the learner reduces them
        for name, parameter in model.named_parameters():
            new = name not in self._trained and name not in self._ignored
            given = id(parameter) in self._given
            self._is_frozen |= given and not parameter.requires_grad
            if new and parameter.requires_grad and has_gradient(parameter):
                self._trained[name] = parameter.numel(), given
                recorder.at_end.add(self.tell)

    def tell(self, summed: int) -> tuple[str, Frame | None]:
        """Return a sentence on the parameters that DDP never reduced, "" if there are none.

        summed: how many numbers the worker has summed in one call: perhaps it was a gradient.
        """
        sizes = [n for n, given in self._trained.values() if not (self.is_reduced and given)]
        if not sizes or summed >= max(sizes):
            return "", self.line
        left = len(sizes)
        what = f"{left} parameter{'s' * (left > 1)} of this model {'were' if left > 1 else 'was'}"
        late = self._is_frozen or not all(given for _, given in self._trained.values())
        return f"{what} never reduced: {_LATE if late else _AROUND}", self.line


_LATE = "replace, freeze or unfreeze layers before DistributedDataParallel wraps the model"
_AROUND = (
    "keep what DistributedDataParallel returns, call it, let the loss depend on all parameters, "
    "and use backward(), not torch.autograd.grad"
)
_wrapped: weakref.WeakKeyDictionary[torch.nn.Module, _Wrapped] = weakref.WeakKeyDictionary()


def note_backward(recorder: Recorder, original: Callable, *args: Any, **kwargs: Any) -> None:
    """Note which parameters have gradients after a backward pass."""
    original(*args, **kwargs)
    for model, wrapped in list(_wrapped.items()):
        wrapped.note(recorder, model, lambda parameter: parameter.grad is not None)


def note_grad(
    recorder: Recorder, original: Callable, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Note which parameters have gradients that never reach DDP."""
    if not isinstance(inputs, (torch.Tensor, dict, tuple)):
        inputs = list(inputs)  # it may be an iterator, such as model.parameters()
    found = original(outputs, inputs, *args, **kwargs)
    several = inputs.values() if isinstance(inputs, dict) else inputs
    given = set(map(id, [inputs] if isinstance(inputs, torch.Tensor) else several))
    for model, wrapped in list(_wrapped.items()):
        wrapped.note(recorder, model, lambda parameter: id(parameter) in given)
    return found


class _Hook:
    """The communication hook of one model; `inside` is what it does with a bucket."""

    def __init__(self, model: DistributedDataParallel, parameters: list[torch.Tensor]) -> None:
        self.group: dist.ProcessGroup = model.process_group
        self.model = weakref.ref(model)  # which has the hook
        self.wrapped = _wrapped[model.module] = _Wrapped(model, parameters)
        used = torch.empty(len(parameters), dtype=torch.int32, device="meta")
        method, device = method_of("all_reduce"), parameters[0].device.type
        self.unused = describe(method, (used,))._replace(reduce_op="SUM", device=device)
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self.registered = self.rebuilt = False
        self.inside: Callable[[Any, Any], torch.futures.Future] = _average
        self.state: Any = self
        self.live: dist.Work | None = None  # in DDP.join: counts the ranks that still have data
        self._open: list[torch.futures.Future] = []
        self._posted: Posted | None = None  # the last operation that the hook called

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future:
        current = recorder.current
        self.wrapped.is_reduced = True
        if current is None:
            return self.inside(self.state, bucket)
        if bucket.index() == 0:
            self._open, self._posted = [], None
        before, newest, current.prefix = current.prefix, current.newest, "DDP "
        try:
            future = self.inside(self.state, bucket)
        finally:
            current.prefix = before
        self._open.append(future)
        if current.newest is not newest:
            self._posted = current.newest
        if bucket.is_last() and self._posted is not None:
            # DDP would wait in its C++ code in a moment; a wait here is on the board, and only for
            # the last bucket, whichever is complete last.
            with suppress(Exception):  # DDP itself waits again and raises
                current.block_as_one(self._posted, torch.futures.wait_all, self._open)
        if bucket.is_last() and self.finds_unused:
            self._follow_unused(current)
        return future

    @property
    def finds_unused(self) -> bool:
        """Whether DDP reduces which parameters were used, in C++ code, after the gradients."""
        model = self.model()
        in_cpp = type(self.group) is dist.ProcessGroup  # methods in Python are recorded
        if model is None or not in_cpp:
            return False
        return model.find_unused_parameters and not model.static_graph

    def _follow_unused(self, recorder: Recorder) -> None:
        """Record what DDP calls when this hook has returned, and waits for after the backward."""
        try:
            _after_backward(lambda: _after_backward(begin()))
        except RuntimeError:  # a rank that has joined has no backward: see _match_in_forward
            return
        posted = recorder.post(self.group, self.unused, op="DDP find_unused_parameters")
        begin = functools.partial(recorder.begin_wait, posted)

    def divisor(self) -> int:
        """Return the number of ranks over which DDP averages."""
        if self.live is None:
            return self.group.size()
        self.live.wait()
        return int(self.live.result()[0].item())


def _average(hook: _Hook, bucket: dist.GradBucket) -> torch.futures.Future:
    """Do exactly what DDP does without a hook: it multiplies and then sums."""
    gradients = bucket.buffer().mul_(1.0 / hook.divisor())
    work = dist.all_reduce(gradients, group=hook.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


_hooks: weakref.WeakKeyDictionary[Any, _Hook] = weakref.WeakKeyDictionary()  # by their Reducer


def _make_reducer(
    _: Recorder,
    original: Callable,
    model: DistributedDataParallel,
    parameters: list[torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> None:
    level = dist.get_debug_level()
    if level == dist.DebugLevel.OFF:  # above it, DDP's errors have the names of parameters
        dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        original(model, parameters, *args, **kwargs)
    finally:
        dist.set_debug_level(level)
    hook = _hooks[model.reducer] = _Hook(model, parameters)
    FEATURE.found["_register_comm_hook"][1](model.reducer, None, hook)  # PyTorch's own function


def _register(_: Recorder, original: Callable, reducer: Any, *given: Any) -> None:
    """Note the learner's hook. given: its state and itself, or the kind of a built-in hook."""
    hook = _hooks.get(reducer)
    if hook is None or hook.registered:
        original(reducer, *given)  # which raises if there already is one
        return
    if len(given) == 1:
        half = given[0] == dist.BuiltinCommHookType.FP16_COMPRESS
        builtin = default_hooks.fp16_compress_hook if half else default_hooks.allreduce_hook
        given = hook.group, builtin
    hook.state, hook.inside = given
    hook.registered = True


def _count_live(
    recorder: Recorder, original: Callable, reducer: Any, work: dist.Work, divide_by_all: bool
) -> None:
    original(reducer, work, divide_by_all)
    recorder.look_after(work)  # PyTorch's C++ code waits for it, if anybody has to
    if (hook := _hooks.get(reducer)) is not None:
        hook.live = None if divide_by_all else work


def _match_in_forward(recorder: Recorder, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call what starts a collective only for ranks that have joined; PyTorch drops its Work."""
    newest = recorder.newest
    done = original(*args, **kwargs)
    if recorder.newest is not newest:
        recorder.expect_no_wait(recorder.newest)
    return done


def _compare_models(
    recorder: Recorder, original: Callable, group: dist.ProcessGroup, *args: Any
) -> Any:
    posted = recorder.post(
        group, Call("verify_params"), op="DistributedDataParallel", blocking=True
    )
    return recorder.block_as_one(posted, original, group, *args)


def _broadcast(
    recorder: Recorder,
    original: Callable,
    group: dist.ProcessGroup,
    tensors: list,
    buffer_size: int,
    src: int = 0,
) -> None:
    call = describe("broadcast", (tensors,))._replace(root=src)
    posted = recorder.post(group, call, op="DDP broadcast", blocking=True)
    recorder.block_as_one(posted, original, group, tensors, buffer_size, src)


def _rebuild(recorder: Recorder, original: Callable, reducer: Any) -> bool:
    hook = _hooks.get(reducer)
    if hook is None or hook.rebuilt:
        return original(reducer)
    posted = recorder.post(
        ("DDP", hook.ranks), Call("rebuild_buckets"), op="DDP forward", blocking=True
    )
    hook.rebuilt = recorder.block_as_one(posted, original, reducer)
    if not hook.rebuilt:  # nothing was sent; DDP asks before every forward
        recorder.take_back(posted)
    return hook.rebuilt


def _after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is on."""
    FEATURE.found["_execution_engine"][1].queue_callback(callback)


REPLACEMENTS = {
    "torch.nn.parallel:DistributedDataParallel._ddp_init_helper": _make_reducer,
    "torch.distributed:Reducer._set_forward_pass_work_handle": _count_live,
    "torch.distributed:_register_comm_hook": _register,
    "torch.distributed:_register_builtin_comm_hook": _register,
    "torch.nn.parallel:DistributedDataParallel._check_global_requires_backward_grad_sync": (
        _match_in_forward
    ),
    "torch.nn.parallel:DistributedDataParallel._match_unused_params_allreduce": _match_in_forward,
    "torch.distributed:Reducer._rebuild_buckets": _rebuild,
    "torch.distributed:_verify_params_across_processes": _compare_models,
    "torch.distributed:_broadcast_coalesced": _broadcast,
}
# All or none: a hook of the kit's must know the hook that the learner registers, which takes its
# place, and by how many ranks DDP divides inside `join`.
FEATURE = Feature(
    "what DistributedDataParallel sends is not traced",
    *REPLACEMENTS,
    "torch.autograd:Variable._execution_engine",  # is not replaced
)
