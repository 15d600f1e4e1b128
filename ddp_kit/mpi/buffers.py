"""Tensors and reductions in MPI's terms: memory, element types and operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ddp_kit.mpi.launcher import load_mpi

_MOST = 2**31 - 1  # MPI counts in a C int


def check(tensor: torch.Tensor) -> None:
    """Raise RuntimeError for a tensor whose memory MPI cannot use."""
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f'the "mpi4py" backend supports CPU tensors only, got one on {tensor.device}; '
            "copy it to the CPU first, or use gloo or nccl"
        )
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f'the "mpi4py" backend supports dense tensors only, got layout {tensor.layout}'
        )


def check_dtypes(name: str, tensors: Sequence[torch.Tensor], other: torch.Tensor) -> None:
    """Raise ValueError for tensors of several dtypes, whose bits would be misread."""
    for tensor in tensors:
        if tensor.dtype is not other.dtype:
            raise ValueError(
                f"{name} needs tensors of one dtype, got {tensor.dtype} and {other.dtype}"
            )


def send_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory to send from: the tensor itself, or a contiguous copy."""
    check(tensor)
    tensor = tensor.detach()
    return tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def receive_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory to receive in: the tensor itself, or a new one to `copy_back` later."""
    check(tensor)
    tensor = tensor.detach()
    return tensor if _is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def copy_back(tensors: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Copy what was received into the tensors, unless it is there already."""
    for tensor, buffer in zip(tensors, received, strict=True):
        if tensor.data_ptr() != buffer.data_ptr() or not _is_plain(tensor):
            tensor.detach().copy_(buffer.view(tensor.shape))


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


def numels(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def without_overlap(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it if it shares memory with another, which MPI forbids."""
    start, other_start = tensor.data_ptr(), other.data_ptr()
    overlap = start < other_start + other.nbytes and other_start < start + tensor.nbytes
    return tensor.clone() if overlap else tensor


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


def split_counts(tensor: torch.Tensor, splits: Sequence[int], size: int, name: str) -> list[int]:
    """Return the number of elements for each rank. splits: numbers of rows; empty: equal ones."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if length % size:
            raise ValueError(f"{name} has {length} rows, which {size} ranks cannot share equally")
        splits = [length // size] * size
    if len(splits) != size or sum(splits) != length or min(splits) < 0:
        raise ValueError(
            f"the split sizes of {name} must be {size} numbers that add up to its {length} rows, "
            f"got {list(splits)}"
        )
    row = math.prod(tensor.shape[1:])
    return [split * row for split in splits]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory holds the values as they are, one after another."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@functools.cache
def _integer_types() -> dict[int, Any]:
    MPI = load_mpi()
    types = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
    return {**types, 16: MPI.C_DOUBLE_COMPLEX}  # MPI has no integer of 16 bytes


_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_BITWISE = ("BAND", "BOR", "BXOR")
_OPS = {hash(getattr(ReduceOp, name)): name for name in _NAMES}
_OF_BOOL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}


class Reduction:
    """A ReduceOp on one dtype in a group of `size` ranks, as MPI computes it.

    MPI has no type for float16, bfloat16 and the 8-bit floats. They are reduced in float32 over
    all ranks and rounded once at the end, whereas gloo rounds after every addition, so the last
    bit may differ. bool is reduced as bytes of 0 and 1: SUM and MAX are "or", PRODUCT and MIN are
    "and".

    Raises ValueError if MPI has no such reduction.
    """

    def __init__(self, op: ReduceOp, dtype: torch.dtype, size: int) -> None:
        name = _OPS.get(hash(op))
        if name is None:
            raise ValueError(f'the "mpi4py" backend supports {", ".join(_NAMES)}, got {op}')
        _check_op(name, dtype)
        small = dtype.is_floating_point and dtype.itemsize < 4
        self.dtype = torch.float32 if small else dtype  # that MPI computes in
        self.divisor = size if name == "AVG" else 1
        self.type = _number_types().get(self.dtype)
        if self.type is None:
            raise ValueError(f'the "mpi4py" backend cannot reduce tensors of {dtype}')
        name = _OF_BOOL.get(name, name) if dtype is torch.bool else name
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


def _check_op(name: str, dtype: torch.dtype) -> None:
    integral = not dtype.is_floating_point and not dtype.is_complex
    if name in _BITWISE and not integral:
        raise ValueError(f"ReduceOp.{name} needs integers or bool, got {dtype}")
    if name == "AVG" and integral:
        raise ValueError(f"ReduceOp.AVG needs floating point or complex numbers, got {dtype}")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"ReduceOp.{name} needs real numbers, got {dtype}")


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
