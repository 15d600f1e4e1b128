"""Tensors and reductions in MPI's terms: memory, element types and operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ddp_kit.backends.group import tensors as dense
from ddp_kit.backends.group.tensors import copy_back, numels
from ddp_kit.backends.mpi.launcher import load_mpi

_MOST = 2**31 - 1  # MPI counts in a C int


def check(tensor: torch.Tensor) -> None:
    """Raise RuntimeError for a tensor whose memory MPI cannot use."""
    dense.check("mpi4py", tensor)


def send_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory to send from: the tensor itself, or a contiguous copy."""
    check(tensor)
    return dense.source_of(tensor)


def receive_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory to receive in: the tensor itself, or a new one to `copy_back` later."""
    check(tensor)
    return dense.target_of(tensor)


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of all tensors in one flat tensor."""
    flat = [send_buffer(tensor).reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def empty_flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new flat tensor with room for the values of all tensors."""
    for tensor in tensors:
        check(tensor)
    return torch.empty(sum(numels(tensors)), dtype=tensors[0].dtype)


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the values of a flat tensor back into tensors."""
    copy_back(tensors, flat.split(numels(tensors)))


def describe(
    tensor: torch.Tensor, counts: Sequence[int] | None = None, type: Any = None
) -> list[Any]:
    """Return what mpi4py needs to use a tensor's memory: [memory, count or counts, type].

    counts: how many elements belong to each rank. type: MPI's type of the elements; None: integers
    of their size, which is enough to move values, and MPI has no type for float16 and bfloat16.
    """
    count = tensor.numel()
    if count > _MOST:
        raise ValueError(f"MPI moves at most {_MOST} elements at once, got {count}")
    memory = load_mpi().buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [
        memory,
        count if counts is None else list(counts),
        type or _integer_types()[tensor.itemsize],
    ]


@functools.cache
def _integer_types() -> dict[int, Any]:
    MPI = load_mpi()
    types = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
    return {**types, 16: MPI.C_DOUBLE_COMPLEX}  # MPI has no integer of 16 bytes


class Reduction:
    """A ReduceOp on one dtype in a group of `size` ranks, as MPI computes it.

    MPI has no type for float16, bfloat16 and the 8-bit floats. They are reduced in float32 over
    all ranks and rounded once at the end, whereas gloo rounds after every addition, so the last
    bit may differ. bool is reduced as bytes of 0 and 1: SUM and MAX are "or", PRODUCT and MIN are
    "and".

    Raises ValueError if MPI has no such reduction.
    """

    def __init__(self, op: ReduceOp, dtype: torch.dtype, size: int) -> None:
        name = dense.reduction_name("mpi4py", op, dtype)
        small = dtype.is_floating_point and dtype.itemsize < 4
        self.dtype = torch.float32 if small else dtype  # that MPI computes in
        self.divisor = size if name == "AVG" else 1
        self.type = _number_types().get(self.dtype)
        if self.type is None:
            raise ValueError(f'the "mpi4py" backend cannot reduce tensors of {dtype}')
        name = dense.OF_BOOL.get(name, name) if dtype is torch.bool else name
        # AVG is MPI's sum, divided at the end.
        self.op = getattr(load_mpi(), {"AVG": "SUM", "PRODUCT": "PROD"}.get(name, name))

    def flatten(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values of all tensors in one flat tensor, in the dtype MPI computes in."""
        return flatten(tensors).to(self.dtype)

    def receive_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a result: the tensor itself if possible."""
        buffer = receive_buffer(tensor)
        same = buffer.dtype is self.dtype
        return buffer if same else torch.empty(buffer.shape, dtype=self.dtype)

    def describe(self, tensor: torch.Tensor) -> list[Any]:
        """Return what mpi4py needs to reduce a tensor's memory."""
        return describe(tensor, type=self.type)

    def copy_back(self, result: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a result into the tensor, which rounds it; for AVG, divide it first."""
        if self.divisor != 1:
            result.div_(self.divisor)
        copy_back([tensor], [result])


reduction_of = functools.cache(Reduction)


@functools.cache
def _number_types() -> dict[torch.dtype, Any]:
    MPI = load_mpi()
    return {
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.complex64: MPI.C_FLOAT_COMPLEX,
        torch.complex128: MPI.C_DOUBLE_COMPLEX,
        torch.bool: MPI.UINT8_T,
        torch.uint8: MPI.UINT8_T,
        torch.uint16: MPI.UINT16_T,
        torch.uint32: MPI.UINT32_T,
        torch.uint64: MPI.UINT64_T,
        torch.int8: MPI.INT8_T,
        torch.int16: MPI.INT16_T,
        torch.int32: MPI.INT32_T,
        torch.int64: MPI.INT64_T,
    }
