"""Why a value of ranks differs from that of one process: the usual mistakes.

Plain tensors in, a cause out. They are float64 or complex128, and on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ddp_kit.error_text import name_ranks

MOST_GUESSED = 8  # the largest world size to try if it is unknown
FEW = 8  # fewer numbers may be a multiple of others by chance
COARSE = 1e-3  # slack from which a few numbers show nothing
FINE = 1e-4  # slack up to which a few numbers, if not whole, are no whole multiple by chance

Tensors = Sequence[torch.Tensor]


class Cause(NamedTuple):
    """Why a value differs: a name for programs, and a sentence."""

    name: str
    text: str


def find_cause(
    mine: Tensors, references: Tensors, rank: int | None, slack: float, parts: Tensors = ()
) -> Cause | None:
    """Return why a rank's value is not what it should be; None if that is no usual mistake.

    mine: the value of each rank, or a single one, and then rank is None. references: what each
    should be, or a single one for all. slack: what rounding explains, relative to the largest
    number of a tensor. parts: what each rank held before the reduction, if that is known.
    """
    have, want = mine[rank or 0], references[rank or 0 if len(references) > 1 else 0]
    by_rank, shared = rank is not None, len(references) == 1
    bound = slack * _largest(want)
    if have.shape != want.shape:
        return _gathered(mine, want, bound) if by_rank and shared else None
    if broken := int((~have.isfinite() & want.isfinite()).sum()):
        places = "1 place" if broken == 1 else f"{broken:,} places"
        return Cause("not finite", f"NaN or infinity is in {places} where numbers should be.")
    if not want.any() or not all(value.isfinite().all() for value in (*mine, want)):
        return None
    cause = None
    if by_rank and not shared:
        cause = _of_other_ranks(mine, references, bound)
    elif by_rank:
        cause = _own_parts(mine, want, slack)
    if not cause and not have.any():
        return Cause("zeros", "It is all zeros: nothing was written into it.")
    cause = cause or _multiple(have, want, slack, len(mine) if by_rank else None)
    for size in [len(mine)] if by_rank else range(2, MOST_GUESSED + 1):
        for dim in range(want.dim()):
            if not cause and 2 <= size <= want.shape[dim]:
                cause = _pieces(have.chunk(size, dim), want.chunk(size, dim), dim, bound)
    if by_rank and shared:
        cause = cause or _drift(mine, want, bound)
    return cause or (_mixture(have, want, parts, slack) if parts else None)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _close(one: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    return one.shape == other.shape and bool(((one - other).abs() <= bound).all())


def _order(found: Tensors, wanted: Tensors, bound: float) -> list[int]:
    """Return which of the wanted tensors each found one is; empty if one is none of them."""
    order: list[int] = []
    free = dict(enumerate(wanted))
    for place, one in enumerate(found):
        candidates = sorted(free, key=lambda number: number != place)  # its own first
        match = next((c for c in candidates if _close(one, free[c], bound)), None)
        if match is None:
            return []
        order.append(match)
        del free[match]
    return order


def _of_other_ranks(mine: Tensors, references: Tensors, bound: float) -> Cause | None:
    """Recognize ranks that hold what other ranks should hold."""
    order = _order(mine, references, bound)
    moved = [
        f"rank {rank} holds rank {whose}'s" for rank, whose in enumerate(order) if rank != whose
    ]
    return Cause("swapped shards", f"Shards are swapped: {', '.join(moved)}.") if moved else None


def _own_parts(mine: Tensors, want: torch.Tensor, slack: float) -> Cause | None:
    """Recognize ranks that still hold what they had before the reduction."""
    if any(value.shape != want.shape for value in mine):
        return None
    total = torch.stack(list(mine)).sum(0)
    bound = slack * max(map(_largest, (*mine, want)))
    wrong = [value for value in mine if not _close(value, want, bound)]
    if all(_close(value, wrong[0], bound) for value in wrong):
        return None  # a single one that is hardly wrong would not show in the mean
    for name, reduced in (("mean", total / len(mine)), ("sum", total)):
        if _close(reduced, want, bound):
            text = f"The {name} of all ranks' values is the reference: each rank still holds"
            return Cause("not reduced", f"{text} its own, and they were never reduced.")
    return None


def _multiple(
    have: torch.Tensor, want: torch.Tensor, slack: float, world_size: int | None
) -> Cause | None:
    """Recognize a multiple of the reference."""
    if have.numel() < FEW and slack > COARSE:
        return None
    factor = ((want.conj() * have).sum() / (want.conj() * want).sum()).real.item()

    def is_times(multiple: float) -> bool:
        return _close(have, multiple * want, slack * abs(multiple) * _largest(want))

    n, was = world_size or 1, "it was"
    if world_size is None and factor > 0 and have.numel() >= FEW:
        n = round(max(factor, 1 / factor))
        was = f"if there are {n} ranks, it was"
    if n > 1 and is_times(n):
        text = f"It is {n} times the reference: {was} summed and not averaged."
        micro = f" If there are {n} micro-batches, divide the loss of each by {n}."
        return Cause("summed", f"{text} Divide it by the world size.{'' if world_size else micro}")
    if n > 1 and is_times(1 / n):
        text = (
            f"It is 1/{n} of the reference: {was} averaged twice, or averaged where a sum is right."
        )
        return Cause("averaged twice", text)
    if n > 2 and world_size and is_times((n - 1) / n):
        text = f"It is {n - 1}/{n} of the reference, as if the part of one rank were missing."
        return Cause("part missing", text)
    whole, size = round(factor), want.abs()
    by_chance = have.numel() < FEW and (slack > FINE or size.equal(size.round()))
    if whole > 1 and not by_chance and is_times(whole):
        text = f"It is {whole} times the reference, as if a division by {whole} were missing:"
        return Cause("scaled", f"{text} by the number of micro-batches, ranks or examples.")
    if have.numel() >= FEW and is_times(factor):
        return Cause("scaled", f"It is {factor:.6g} times the reference.")
    return None


def _gathered(mine: Tensors, want: torch.Tensor, bound: float) -> Cause | None:
    """Recognize ranks that hold shards of the reference."""
    for dim in range(want.dim()):
        others = {(*value.shape[:dim], -1, *value.shape[dim + 1 :]) for value in mine}
        if others != {(*want.shape[:dim], -1, *want.shape[dim + 1 :])}:
            continue
        sizes = [value.shape[dim] for value in mine]
        if sum(sizes) == want.shape[dim]:
            if cause := _pieces(mine, want.split(sizes, dim), dim, bound):
                return cause
            if _close(torch.cat(list(mine), dim), want, bound):
                text = f"Each rank holds its shard along dimension {dim} of the reference"
                return Cause("sharded", f"{text}: gather them before you compare.")
    return None


def _pieces(found: Tensors, wanted: Tensors, dim: int, bound: float) -> Cause | None:
    """Recognize shards of a tensor that are missing or in the wrong order."""
    order = _order(found, wanted, bound)
    if order and order != sorted(order):
        numbers = ", ".join(map(str, order))
        text = f"Its {len(found)} shards along dimension {dim} are swapped: they come in the order"
        return Cause("swapped shards", f"{text} {numbers}.")
    wrong = [i for i, one in enumerate(found) if not _close(one, wanted[i], bound)]
    if 0 < len(wrong) < len(found) and not any(found[i].any() for i in wrong):
        text = f"Of its {len(found)} shards along dimension {dim}, counted from 0,"
        shards = name_ranks(wrong).replace("rank", "shard")
        verb = "is" if len(wrong) == 1 else "are"
        return Cause("shard missing", f"{text} {shards} {verb} missing: only zeros are there.")
    return None


def _drift(mine: Tensors, want: torch.Tensor, bound: float) -> Cause | None:
    """Recognize ranks that differ from each other."""
    right = [rank for rank, value in enumerate(mine) if _close(value, want, bound)]
    if len(right) == len(mine) or all(_close(value, mine[0], bound) for value in mine):
        return None
    agree = f"The ranks differ from each other, and {'no rank' if not right else name_ranks(right)}"
    verb = "equals" if len(right) < 2 else "equal"
    text = f"{agree} {verb} the reference: replicas have drifted, because of different starts or"
    return Cause("drift", f"{text} different updates, or a sum over the ranks is missing.")


def _mixture(have: torch.Tensor, want: torch.Tensor, parts: Tensors, slack: float) -> Cause | None:
    """Recognize a wrong mixture of the ranks' own parts, by least squares."""
    if any(part.shape != want.shape for part in parts):
        return None
    rows = torch.stack([part.reshape(-1) for part in parts]).to(want.dtype)
    gram = rows.conj() @ rows.T
    if torch.linalg.matrix_rank(gram, hermitian=True) < len(parts):
        return None
    weights = []
    for value in (have, want):
        weight = torch.linalg.solve(gram, rows.conj() @ value.reshape(-1))
        size = (weight.abs() * rows.abs().amax(1)).sum().item()
        if not _close(weight @ rows, value.reshape(-1), slack * size):
            return None
        weights.append(weight.real)
    times = (weights[0] / weights[1]).tolist()
    absent = [rank for rank, often in enumerate(times) if abs(often) < 0.01]
    if len(absent) == len(parts) - 1:
        (own,) = set(range(len(parts))) - set(absent)
        return Cause("not reduced", f"It is made of rank {own}'s part only.")
    if absent:
        what = "The part" if len(absent) == 1 else "The parts"
        verb = "is" if len(absent) == 1 else "are"
        return Cause("part missing", f"{what} of {name_ranks(absent)} {verb} missing in it.")
    often = ", ".join(f"{factor:.3g}" for factor in times)
    return Cause("weights", f"The parts of the ranks count {often} times as much as they should.")
