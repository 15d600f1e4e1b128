"""Refuses what gloo cannot do, where gloo itself would crash, or return something wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.errors import BackendError
from ddp_kit.trace.calls import flat
from ddp_kit.trace.collectives import FEATURES

# The coalesced all_gather is also that of functional collectives, and so of DTensor.
_ALL_GATHER = "do this all_gather with"
CPU_ONLY = {
    "send": "send",
    "recv": "receive",
    "recv_anysource": "receive",
    "allgather_coalesced": _ALL_GATHER,
    "allgather_into_tensor_coalesced": _ALL_GATHER,
    "all_gather_single_coalesced": _ALL_GATHER,
    "all_gather_into_tensor": _ALL_GATHER,
    "all_gather_into_tensor_coalesced": _ALL_GATHER,
}


def refuse_on_gpus(group: Any, method: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise BackendError if gloo would take a tensor on a GPU for memory of the CPU.

    gloo copies such a tensor to the CPU in most collectives, but not in these: their ranks end
    with "Bad address", or are killed (https://github.com/pytorch/pytorch/issues/152645).
    """
    if method in CPU_ONLY and any(t.is_cuda for t in tensors) and _is_gloo(group, "cuda"):
        raise BackendError(
            f"gloo cannot {CPU_ONLY[method]} a tensor that is on a GPU; "
            "use nccl with a GPU for each rank, or tensors on the CPU"
        )


# Other methods copy what is not contiguous.
_IN_MEMORY_ORDER = {"broadcast", "allreduce", "reduce", "scatter", "reduce_scatter"}
_IN_MEMORY_ORDER |= {"alltoall_base", "all_to_all_single"}  # its name in newer releases
_TO_ONE_TENSOR = set(FEATURES["reduce_scatter_tensor"].found)  # it is copied
_IGNORING_STRIDES = _IN_MEMORY_ORDER | _TO_ONE_TENSOR


def memory_order(group: Any, method: str, args: tuple) -> tuple[int, ...]:
    """Return the strides of a call's tensors if gloo ignores them; (): they are contiguous.

    gloo takes the first number of a tensor and those that follow in memory. This is right if these
    are all of the tensor, and their order is the same on all ranks.

    Raises ValueError if gloo would take numbers beside those of the tensor, or mix orders.
    """
    if method not in _IGNORING_STRIDES:
        return ()
    outputs, inputs = _strided(args[0]), _strided(args[1]) if len(args) > 1 else []
    if all(map(torch.Tensor.is_contiguous, outputs + inputs)):
        return ()
    if not _is_gloo(group, outputs[0].device.type):
        return ()
    if "reduce_scatter" in method:  # gloo copies such inputs
        inputs = [tensor if _is_dense(tensor) else tensor.contiguous() for tensor in inputs]
    tensors = inputs if method in _TO_ONE_TENSOR else outputs + inputs
    for tensor in tensors:
        if not _is_dense(tensor):
            sizes = f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            raise ValueError(
                f"gloo ignores strides, and this tensor of {sizes} has gaps in memory or overlaps "
                "itself: pass its .contiguous(), and copy the result back"
            )
    orders = list(dict.fromkeys(map(_order, tensors)))
    if len(orders) > 1:
        raise ValueError(
            "gloo ignores strides, and those of the tensors in this call differ: pass the "
            ".contiguous() of each"
        )
    return orders[0]


def _strided(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in flat(value) if tensor.layout is torch.strided]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers lie side by side in memory, in whatever order."""
    expected = 1
    for step, size in sorted(_steps(tensor)):
        if step != expected:
            return False
        expected *= size
    return True


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.is_contiguous() else tuple(step for step, _ in _steps(tensor))


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the stride and size of each dimension that has more than one number."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return [(step, size) for step, size in sizes if size > 1]


def _is_gloo(group: Any, device: str) -> bool:
    backends = dist.get_backend_config(group)
    return backends == "gloo" or f"{device}:gloo" in backends
