"""How MPI computes with the elements of a tensor: its types and its operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ddp_kit.mpi import buffers, library

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_BITWISE = ("BAND", "BOR", "BXOR")
_OPS = {hash(getattr(ReduceOp, name)): name for name in _NAMES}
_OF_BOOL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}  # "or" is bool's sum


class Reduction:
    """One dtype and one ReduceOp, as MPI has them.

    float16, bfloat16 and the 8-bit floats have no type in MPI. They are computed in float32, over
    all ranks, and rounded once at the end. gloo rounds after every addition, so the last bit may
    differ. bool is computed as bytes of 0 and 1: SUM and MAX are "or", PRODUCT and MIN are "and".
    """

    @staticmethod
    @functools.cache
    def of(op: ReduceOp, dtype: torch.dtype, size: int) -> Reduction:
        """Return the one for a group of `size` ranks. Raises ValueError where MPI has none."""
        return Reduction(op, dtype, size)

    def __init__(self, op: ReduceOp, dtype: torch.dtype, size: int) -> None:
        name = _OPS.get(hash(op))
        if name is None:
            raise ValueError(f'the "mpi4py" backend reduces with {", ".join(_NAMES)}, got {op}')
        _check(name, dtype)
        small = dtype.is_floating_point and dtype.itemsize < 4
        self.dtype = torch.float32 if small else dtype  # that MPI computes in
        self.divisor = size if name == "AVG" else 1
        self.type = _types().get(self.dtype)
        if self.type is None:
            raise ValueError(f'the "mpi4py" backend cannot compute with {dtype}')
        self.op = _ops()[_OF_BOOL.get(name, name) if dtype is torch.bool else name]

    def row(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values of all tensors in a row, in the dtype that MPI computes in."""
        return buffers.joined(tensors).to(self.dtype)

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a result: the tensor itself where that will do."""
        place = buffers.received(tensor)
        same = place.dtype is self.dtype
        return place if same else torch.empty(place.shape, dtype=self.dtype)

    def described(self, tensor: torch.Tensor) -> list:
        """Describe memory to MPI for computing."""
        return buffers.described(tensor, self.type)

    def land(self, result: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put a result where it belongs; this is where it is rounded."""
        if self.divisor != 1:
            result.div_(self.divisor)
        buffers.copy([tensor], [result])


def _check(name: str, dtype: torch.dtype) -> None:
    integral = not dtype.is_floating_point and not dtype.is_complex
    if name in _BITWISE and not integral:
        raise ValueError(f"ReduceOp.{name} needs integers or bool, got {dtype}")
    if name == "AVG" and integral:
        raise ValueError(f"ReduceOp.AVG needs floating point or complex numbers, got {dtype}")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"ReduceOp.{name} needs numbers with an order, got {dtype}")


@functools.cache
def _types() -> dict[torch.dtype, Any]:
    MPI = library.load()
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


@functools.cache
def _ops() -> dict[str, Any]:
    MPI = library.load()
    return {
        "SUM": MPI.SUM,
        "AVG": MPI.SUM,  # and a division at the end
        "PRODUCT": MPI.PROD,
        "MIN": MPI.MIN,
        "MAX": MPI.MAX,
        "BAND": MPI.BAND,
        "BOR": MPI.BOR,
        "BXOR": MPI.BXOR,
    }
