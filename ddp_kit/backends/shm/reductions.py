"""Sums, and the other reductions, of the chunks that the ranks have written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ReduceOp

from ddp_kit.backends.group import tensors as memory

_STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
# PyTorch does not compute with these; the bits of a sum or a product are those of signed integers.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Reduction:
    """A ReduceOp on one dtype: the value of rank 0, with that of rank 1, with that of rank 2, ...

    This order does not depend on who computes, so all ranks get the same bits, in every run. gloo
    adds in another order, which differs from chunk to chunk: with two ranks the sums are equal bit
    by bit, because a + b is b + a, and with more the last bits of a sum of floats may differ.

    Floats of less than 32 bits are reduced in float32 and rounded once at the end, whereas gloo
    rounds after every addition. bool: SUM and MAX are "or", PRODUCT and MIN are "and".

    Raises ValueError if there is no such reduction.
    """

    def __init__(self, op: ReduceOp, dtype: torch.dtype, size: int) -> None:
        name = memory.reduction_name("shm", op, dtype)
        self.name = memory.OF_BOOL.get(name, name) if dtype is torch.bool else name
        self.code = memory.REDUCTIONS.index(name)
        self._step = _STEPS[self.name]
        self._is_small = dtype.is_floating_point and dtype.itemsize < 4
        self._divisor = size if name == "AVG" else 1
        self._signed = _SIGNED.get(dtype)
        # So that the order of signed integers is that of the unsigned ones.
        shifts = self._signed is not None and name in ("MIN", "MAX")
        self._shift = torch.iinfo(self._signed).min if shifts and self._signed else None

    def __call__(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Reduce flat tensors, in their order, into another one, which may be the first of them."""
        if self._signed is not None:
            parts, out = [part.view(self._signed) for part in parts], out.view(self._signed)
            if self._shift is not None:
                parts = [part ^ self._shift for part in parts]
        if self._is_small:
            total = parts[0].float()
            for part in parts[1:]:
                self._step(total, part.float(), out=total)
            out.copy_(total.div_(self._divisor))
            return
        if len(parts) == 1:
            out.copy_(parts[0])
        else:
            self._step(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self._step(out, part, out=out)
        if self._divisor != 1:
            out.div_(self._divisor)
        if self._shift is not None:
            out.bitwise_xor_(self._shift)


reduction_of = functools.cache(Reduction)
