"""Tensors as flat memory, and what a reduction accepts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp


def check(backend: str, tensor: torch.Tensor) -> None:
    """Raise RuntimeError for a tensor whose memory a backend of the CPU cannot use."""
    if not tensor.is_cpu:
        raise RuntimeError(
            f'the "{backend}" backend supports CPU tensors only, got one on {tensor.device}; '
            "copy it to the CPU first, or use gloo or nccl"
        )
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f'the "{backend}" backend supports dense tensors only, got layout {tensor.layout}'
        )


def check_dtypes(name: str, tensors: Sequence[torch.Tensor], other: torch.Tensor) -> None:
    """Raise ValueError for tensors of several dtypes, whose bits would be misread."""
    for tensor in tensors:
        if tensor.dtype is not other.dtype:
            raise ValueError(
                f"{name} needs tensors of one dtype, got {tensor.dtype} and {other.dtype}"
            )


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory to read from: the tensor itself, or a contiguous copy."""
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def target_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory to write in: the tensor itself, or a new one to `copy_back` later."""
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def copy_back(tensors: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Copy what was received into the tensors, unless it is there already."""
    for tensor, buffer in zip(tensors, received, strict=True):
        if tensor.data_ptr() != buffer.data_ptr() or not is_plain(tensor):
            tensor.detach().copy_(buffer.view(tensor.shape))


def numels(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def without_overlap(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it if it shares memory with another."""
    start, other_start = tensor.data_ptr(), other.data_ptr()
    overlap = start < other_start + other.nbytes and other_start < start + tensor.nbytes
    return tensor.clone() if overlap else tensor


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


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory holds the values as they are, one after another."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
OF_BOOL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}  # on bytes of 0 and 1
_NAMES = {hash(getattr(ReduceOp, name)): name for name in REDUCTIONS}
_BITWISE = ("BAND", "BOR", "BXOR")


def reduction_name(backend: str, op: ReduceOp, dtype: torch.dtype) -> str:
    """Return the name of a reduction. Raise ValueError if there is none for this dtype."""
    name = _NAMES.get(hash(op))
    if name is None:
        raise ValueError(f'the "{backend}" backend supports {", ".join(REDUCTIONS)}, got {op}')
    integral = not dtype.is_floating_point and not dtype.is_complex
    if name in _BITWISE and not integral:
        raise ValueError(f"ReduceOp.{name} needs integers or bool, got {dtype}")
    if name == "AVG" and integral:
        raise ValueError(f"ReduceOp.AVG needs floating point or complex numbers, got {dtype}")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"ReduceOp.{name} needs real numbers, got {dtype}")
    return name
