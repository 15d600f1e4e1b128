"""Records functional collectives, and so those of DTensor, which C++ code starts and waits for.

Each is an operator of PyTorch. It gets a kernel here that calls PyTorch's own. What only traces an
operator or computes its shape, as torch.compile does, ends before it comes to a kernel.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.torch_internals import C10D_MODULE, Feature
from ddp_kit.trace.calls import Call, describe
from ddp_kit.trace.collectives import method_of
from ddp_kit.trace.rank.gloo_limits import refuse_on_gpus
from ddp_kit.trace.rank.recorder import Recorder, while_recorded
from ddp_kit.trace.stacks import is_own

_NAMESPACE = "_c10d_functional"
_NAMES = (  # of the operators, of which torch.compile calls those that work in place
    *("broadcast", "broadcast_", "all_reduce", "all_reduce_"),
    *("all_reduce_coalesced", "all_reduce_coalesced_"),
    *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
    "all_to_all_single",
)
FEATURE = Feature(
    "functional collectives, such as those of DTensor, are not traced",
    f"torch:ops.{_NAMESPACE}.wait_tensor.default._op_dk",
    f"{C10D_MODULE}:_resolve_process_group",
    # What DTensor calls on a GPU to shard by another dimension. It waits for its own collective.
    "torch:ops._dtensor.shard_dim_alltoall",
    *(f"torch:ops.{_NAMESPACE}.{name}" for name in _NAMES),
)
_DEVICES = ("CPU", "CUDA")  # whose kernels are replaced
# Where a learner finds functional collectives: their functions, and torch.ops.
_FUNCTIONS = os.path.join(os.path.dirname(dist.__file__), "_functional_collectives.py")
_OPERATORS = sys.modules[type(torch.ops).__module__].__file__


@functools.cache
def replace_kernels() -> list[torch.library.Library]:
    """Replace the kernels in this process, until the libraries that are returned are deleted."""
    if not FEATURE.is_on:
        return []
    recorded = {name: functools.partial(_start, name) for name in _NAMES}
    return [
        _library(_NAMESPACE, recorded | {"wait_tensor": _wait}),
        _library("_dtensor", {"shard_dim_alltoall": _start_and_wait}),
    ]


def _library(namespace: str, recorded: Mapping[str, Callable]) -> torch.library.Library:
    library = torch.library.Library(namespace, "IMPL")
    for name, record in recorded.items():
        kernel = while_recorded(_kernel_of(name, namespace), record)
        for device in _DEVICES:
            library.impl(name, kernel, device)
    return library


def _kernel_of(name: str, namespace: str) -> Callable:
    """Return PyTorch's own kernel of an operator, which lets other threads run."""
    overload = getattr(getattr(torch.ops, namespace), name).default
    return functools.partial(overload._op_dk, torch.DispatchKey.CompositeExplicitAutograd)


def _resolve_group(group: Any) -> dist.ProcessGroup:
    """Return the process group that an operator is called with, by its name or as itself."""
    return FEATURE.found["_resolve_process_group"][1](group) if isinstance(group, str) else group


def _start(
    name: str,
    recorder: Recorder,
    original: Callable,
    tensors: Any,
    *given: Any,
    **out: torch.Tensor,
) -> Any:
    function = name.removesuffix("_").removesuffix("_out")
    called = _called_by_learner(sys._getframe(), function)
    group = _resolve_group(given[-1])
    refuse_on_gpus(group, function, [tensors] if isinstance(tensors, torch.Tensor) else tensors)
    posted = recorder.post(
        group,
        _describe(function, tensors, *given[:-1]),
        op=recorder.prefix + (called or function),
    )
    try:
        # A backend that is written in Python is called from C++, and its methods are recorded too.
        call = functools.partial(original, tensors, *given, **out)
        results = recorder.block_as_one(None, call)
    except BaseException:
        recorder.take_back(posted)
        raise
    if posted is not None:
        if not called:  # as in DTensor, where nobody sees that a result was never used
            recorder.expect_no_wait(posted)
        for result in [results] if isinstance(results, torch.Tensor) else results:
            memory = _memory(result)
            if function != name:  # in place: PyTorch will wait for earlier ones, too
                recorder.expect_no_wait(recorder.results.get(memory))
            if memory:
                recorder.results[memory] = posted
            else:  # a result without elements
                recorder.expect_no_wait(posted)
    return results


def _start_and_wait(
    recorder: Recorder, original: Callable, tensor: torch.Tensor, *dims_and_group: Any
) -> torch.Tensor:
    group = _resolve_group(dims_and_group[-1])
    call = describe("allreduce", (tensor.reshape(-1),))  # it sends equal parts to all ranks
    method = method_of("all_to_all_single")
    call = call._replace(method=method, outputs=call.inputs)
    posted = recorder.post(group, call, op=recorder.prefix + "shard_dim_alltoall")
    try:
        return recorder.block_as_one(posted, original, tensor, *dims_and_group)
    except BaseException:
        recorder.take_back(posted)
        raise


def _wait(recorder: Recorder, original: Callable, tensor: torch.Tensor) -> torch.Tensor:
    memory = _memory(tensor)
    posted = recorder.results.get(memory)
    done = recorder.block_as_one(posted, original, tensor)
    if posted is not None:
        recorder.results.pop(memory, None)
        if len(posted.site.call.inputs) > 1:  # a batch: its results have one Work
            for place in [at for at, started in recorder.results.items() if started is posted]:
                del recorder.results[place]
    return done


def _memory(tensor: torch.Tensor) -> int:
    """Return where a tensor is stored: PyTorch finds the Work of a result by this, too."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _called_by_learner(frame: FrameType | None, function: str) -> str:
    """Return which functional collective the learner's own code calls; "" if it calls none."""
    inner = frame
    while frame is not None and not is_own(frame.f_code.co_filename):
        inner, frame = frame, frame.f_back
    if frame is None or inner is None:
        return ""
    if inner.f_code.co_filename == _OPERATORS:
        return function
    return inner.f_code.co_name if inner.f_code.co_filename == _FUNCTIONS else ""


def _describe(function: str, tensors: Any, *given: Any) -> Call:
    """Return what a functional collective is called with. given: without the group."""
    call = describe("allreduce", (tensors,))._replace(method=method_of(function))
    if function == "broadcast":
        return call._replace(root=given[0])
    if function == "all_to_all_single":
        rows_from, rows_to = map(tuple, given)
        outputs = _resized(call.inputs, lambda _: sum(rows_from))
        return call._replace(splits=(rows_to, rows_from), outputs=outputs)
    if "reduce" in function:
        call = call._replace(reduce_op=given[0].upper())
    if function.startswith("all_gather"):
        return call._replace(outputs=_resized(call.inputs, lambda rows: rows * given[-1]))
    if function.startswith("reduce_scatter"):
        return call._replace(outputs=_resized(call.inputs, lambda rows: rows // given[-1]))
    return call


def _resized(inputs: Sequence[tuple], rows: Callable[[int], int]) -> tuple:
    """Return the (shape, dtype) of outputs that differ from the inputs in the number of rows."""
    sizes = (((*shape, 1)[0], shape[1:], dtype) for shape, dtype in inputs)
    return tuple(((rows(size), *shape), dtype) for size, shape, dtype in sizes)
