"""Tensors as MPI sees them: an address, a number of elements and a type."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_kit.mpi import library

_MOST = 2**31 - 1  # MPI counts in a C int


def check(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory MPI cannot use."""
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f'the "mpi4py" backend moves tensors on the CPU only, got one on {tensor.device}; '
            "copy it to the CPU first, or use gloo or nccl"
        )
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f'the "mpi4py" backend moves dense tensors only, got one of layout {tensor.layout}'
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the values lie in memory one after another, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory to send from: the tensor itself, or a copy in one piece."""
    check(tensor)
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def received(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory to receive in: the tensor itself, or a new one; then `copy` it back."""
    check(tensor)
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def copy(targets: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
    """Copy what was received to where it belongs, unless it is there."""
    for target, piece in zip(targets, pieces, strict=True):
        if target.data_ptr() != piece.data_ptr() or not is_plain(target):
            target.detach().copy_(piece.view(target.shape))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of all tensors in a row."""
    pieces = [sent(tensor).reshape(-1) for tensor in tensors]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def room(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return new memory for the values of all tensors in a row."""
    for tensor in tensors:
        check(tensor)
    return torch.empty(sum(counts(tensors)), dtype=tensors[0].dtype)


def deal(row: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that copies a row of values back into tensors."""
    return lambda: copy(tensors, row.split(counts(tensors)))


def counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how many elements each tensor has."""
    return [tensor.numel() for tensor in tensors]


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors in one piece share memory, which MPI forbids."""
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes


def apart(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it where it shares memory with another."""
    return tensor.clone() if overlap(tensor, other) else tensor


def as_bits(tensor: torch.Tensor, split: Sequence[int] | None = None) -> list:
    """Describe memory to MPI for moving values, whatever they mean.

    MPI has no type for float16 and bfloat16. Moving needs none: elements travel as integers of
    their size. split: how many elements belong to each rank.
    """
    MPI = library.load()
    types = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
    types[16] = MPI.C_DOUBLE_COMPLEX
    return described(tensor, types[tensor.itemsize], split)


def described(tensor: torch.Tensor, type: Any, split: Sequence[int] | None = None) -> list:
    """Describe memory to MPI as elements of a type. Nothing is copied."""
    count = tensor.numel()
    if count > _MOST:
        raise ValueError(f"MPI moves at most {_MOST} elements at once, got {count}")
    memory = library.load().buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, count, type] if split is None else [memory, list(split), type]


def rows(tensor: torch.Tensor, splits: Sequence[int], size: int, name: str) -> list[int]:
    """Return how many elements go to or come from each rank. splits: rows; empty: even ones."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if length % size:
            raise ValueError(f"{name} has {length} rows, and {size} ranks cannot share them evenly")
        splits = [length // size] * size
    if len(splits) != size or sum(splits) != length or min(splits) < 0:
        raise ValueError(
            f"the split sizes of {name} must be {size} numbers that add up to its {length} rows, "
            f"got {list(splits)}"
        )
    row = math.prod(tensor.shape[1:])
    return [split * row for split in splits]
