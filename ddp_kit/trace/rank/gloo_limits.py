"""Refuses what gloo cannot do, where gloo itself would crash, or return something wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.errors import BackendError

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
    if method in CPU_ONLY and any(tensor.is_cuda for tensor in tensors) and _is_gloo(group):
        raise BackendError(
            f"gloo cannot {CPU_ONLY[method]} a tensor that is on a GPU; "
            "use nccl with a GPU for each rank, or tensors on the CPU"
        )


def _is_gloo(group: Any) -> bool:
    backends = dist.get_backend_config(group)
    return backends == "gloo" or "cuda:gloo" in backends
