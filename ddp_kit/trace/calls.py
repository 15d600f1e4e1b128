"""What a call of a ProcessGroup's method says: the tensors in it, the root, the reduction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, ReduceOp

# What hands out a Work. `dist.send`, `dist.all_gather_object` and all the others end in one of
# these, however they were imported, so one wrapper around each sees them all. The names differ
# between releases of PyTorch.
POINT_TO_POINT = ("send", "recv", "recv_anysource")
_IN_PLACE = ("broadcast", "reduce", "allreduce", "allreduce_coalesced")  # they give what they take
_COLLECTIVES = (
    *_IN_PLACE,
    *("gather", "scatter", "barrier", "allgather", "_allgather_base", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
METHODS = tuple(n for n in (*POINT_TO_POINT, *_COLLECTIVES) if hasattr(ProcessGroup, n))
_KINDS = {"send": "send", "recv": "recv", "recv_anysource": "any"}
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
_REDUCING = {n for n in _COLLECTIVES if n.startswith(("reduce", "_reduce", "allreduce"))}
_SPLITTING = {"alltoall_base", "all_to_all_single"}
_REDUCE_OPS = {
    hash(getattr(ReduceOp, name)): name
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    if hasattr(ReduceOp, name)
}


class Call(NamedTuple):
    """What the ranks of one operation must agree on. Two equal calls have equal hashes."""

    method: str
    root: int | None = None  # rank in the group
    reduce_op: str | None = None
    splits: tuple = ()
    inputs: tuple = ()  # (shape, dtype) of each tensor
    outputs: tuple = ()
    device: str = "cpu"  # where its first tensor is


def kind_of(method: str) -> str:
    """Return "send", "recv", "any" for a receive from any source, or "collective"."""
    return _KINDS.get(method, "collective")


def describe(method: str, args: tuple) -> Call:
    """Read the arguments of a collective, or of send and recv."""
    root = reduce_op = None
    splits: tuple = ()
    outputs: tuple = ()
    if method in _KINDS:
        inputs = _described(args[0])
        if method != "send":
            inputs, outputs = (), inputs
    elif method in _IN_PLACE:
        inputs = _described(args[0])
    elif len(args) > 1:
        inputs, outputs = _described(args[1]), _described(args[0])
    else:
        inputs = ()  # a barrier has no tensors
    if method in _ROOTED:
        root = getattr(args[-1], "rootRank", None)
    if method in _REDUCING:
        reduce_op = _REDUCE_OPS.get(hash(getattr(args[-1], "reduceOp", None)))
    if method in _SPLITTING and len(args) > 3:
        rows_from, rows_to = args[2:4]
        splits = (tuple(rows_to), tuple(rows_from)) if len(rows_to) or len(rows_from) else ()
    return Call(method, root, reduce_op, splits, inputs, outputs, _device(args))


def _device(values: Iterable[Any]) -> str:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
            return _device(value)
    return "cpu"


def _described(value: Any) -> tuple:
    if isinstance(value, torch.Tensor):
        return ((value.shape, value.dtype),)
    if not isinstance(value, (list, tuple)):
        return ()
    if len(value) == 1:  # nearly always
        return _described(value[0])
    return tuple(described for inner in value for described in _described(inner))


def nbytes(tensors: tuple) -> int:
    """Return how many bytes tensors hold. tensors: (shape, dtype) of each."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors if dtype)
