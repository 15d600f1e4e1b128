"""What is compared: the tensors and other values in results, modules, lists and dicts, by name."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_kit.error_text import count
from ddp_kit.errors import CompareError
from ddp_kit.pool import Result

Path = tuple[Any, ...]  # the keys and indices that lead to a value
Leaves = dict[Path, Any]
_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod)\.")  # of DDP and of torch.compile


class Numbers(NamedTuple):
    """Numbers to compare: float64, complex128 or int64 on the CPU, and the dtype they had."""

    values: torch.Tensor
    dtype: torch.dtype


def pair(mine: Any, reference: Any) -> tuple[list, list, bool]:
    """Return the values, what they should be, and whether they belong to ranks.

    If all should be the same, the second list has a single entry. Raises CompareError if the two
    are of different numbers of ranks.
    """
    if isinstance(mine, Result | list | tuple) and _is_by_rank(reference, mine):
        if len(mine) != len(reference):
            raise CompareError(
                f"mine has {count(len(mine), 'value')} and reference has {len(reference)}; "
                "both must have one for each rank"
            )
        return list(mine), list(reference), True
    if isinstance(reference, Result):
        raise CompareError(
            f"reference has values of {count(len(reference), 'rank')}, but mine is a single value; "
            "swap the two, or choose one of these values, such as reference[0]"
        )
    if isinstance(mine, Result) or _depth(mine) == _depth(reference) + 1:
        if not len(mine):
            raise CompareError("mine is an empty list; it must have a value for each rank")
        return list(mine), [reference], True
    return [mine], [reference], False


def _is_by_rank(reference: Any, mine: Any) -> bool:
    """Return whether `reference` has a value for each rank of `mine`."""
    if isinstance(reference, Result):
        return True
    return isinstance(mine, Result) and len(mine) > 0 and _depth(reference) == _depth(mine[0]) + 1


def _depth(value: Any) -> int:
    """Return in how many lists the first value that is no list lies."""
    depth = 0
    while isinstance(value, list | tuple):
        value, depth = (value[0] if value else None), depth + 1
        if depth > 1000:
            raise RecursionError
    return depth


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each value that is no list or dict, with the keys and indices that lead to it."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, f"[{index}]"))
    else:
        yield path, value


def named_alike(values: Leaves, others: Leaves) -> Leaves:
    """Return `values`, without the prefixes that DDP adds if the names then agree better."""
    if values.keys() == others.keys():
        return values
    bare = {
        tuple(_WRAPPERS.sub("", key) if isinstance(key, str) else key for key in path): value
        for path, value in values.items()
    }
    better = len(bare.keys() & others.keys()) > len(values.keys() & others.keys())
    return bare if better and len(bare) == len(values) else values


def format_path(path: Path) -> str:
    """Return the name of a value: "state.0.exp_avg", "losses[2]"; "" if it has none."""
    name = ""
    for key in path:
        index = isinstance(key, str) and key.startswith("[")
        name += f"{key}" if index or not name else f".{key}"
    return name


def read(value: Any, path: Path) -> Numbers | None:
    """Return the numbers in a value; None if it has none, as a string.

    Raises CompareError for a tensor whose numbers this process does not have.
    """
    subject = f"{format_path(path)!r}" if path else "the value"
    if hasattr(value, "full_tensor"):
        raise CompareError(
            f"{subject} is a DTensor, of which each rank has a shard; return "
            "tensor.full_tensor() from every rank, and compare that"
        )
    try:
        if type(value).__module__ == "numpy":
            value = torch.as_tensor(value)
        elif isinstance(value, int | float | complex):  # bool is an int
            return _read_number(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    if not isinstance(value, torch.Tensor):
        return None
    try:
        dense = value.dequantize() if value.is_quantized else value.detach()
        dense = (dense if dense.layout is torch.strided else dense.to_dense()).cpu()
        if value.is_complex():
            return Numbers(dense.to(torch.complex128), value.dtype)
        wide = torch.float64 if dense.is_floating_point() else torch.int64
        return Numbers(dense.to(wide), dense.dtype)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise CompareError(f"the numbers of {subject} cannot be read: {reason}") from error


def _read_number(value: complex) -> Numbers:
    if isinstance(value, int):
        return Numbers(torch.tensor(value, dtype=torch.int64), torch.int64)
    # It usually comes from `item()`, and is no more exact than the tensor was.
    default = torch.get_default_dtype()
    if isinstance(value, complex):
        return Numbers(torch.tensor(value, dtype=torch.complex128), default.to_complex())
    return Numbers(torch.tensor(value, dtype=torch.float64), default)


def same(one: Any, other: Any, path: Path) -> bool:
    """Return whether two values without numbers are equal.

    Raises CompareError if they cannot say.
    """
    try:
        return bool(one == other)
    except Exception as error:
        subject = f"{format_path(path)!r}" if path else "the value"
        raise CompareError(
            f"{subject} is of type {type(one).__name__}; it must be a tensor, number, string, "
            "module, or a list or dict of them"
        ) from error


def describe(value: Any, numbers: Numbers | None) -> str:
    """Return a value in a few words: "a float32 tensor of shape (3,)"."""
    if numbers is None or not isinstance(value, torch.Tensor):
        return reprlib.repr(value)
    return f"a {name_dtype(numbers.dtype)} tensor of shape {tuple(numbers.values.shape)}"


def name_dtype(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
