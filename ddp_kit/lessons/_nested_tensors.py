"""The tensors in what a module gets and returns: alone, or in tuples, lists and dicts."""

from __future__ import annotations

from typing import Any

import torch


def with_gradients(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output that get gradients.

    It may be a tensor, or tuples, lists and dicts of tensors. Raises TypeError for other objects,
    in which tensors might be missed, unless gradients are off.
    """
    if not torch.is_grad_enabled() or isinstance(output, (int, float, str, type(None))):
        return []
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    if not isinstance(output, (tuple, list, dict)):
        raise TypeError(
            "a sharded module must return a tensor, or a tuple, list or dict of tensors, "
            f"got a value of type {type(output).__name__}"
        )
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in with_gradients(part)]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with the floating-point tensors in it cast to `dtype`.

    Tuples, named or not, lists and dicts are copied, dicts as plain ones; other objects stay.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        parts = [cast(each, dtype) for each in value]
        named = hasattr(value, "_fields")  # a named tuple takes its fields one by one
        return type(value)(*parts) if named else type(value)(parts)
    if isinstance(value, dict):
        return {name: cast(each, dtype) for name, each in value.items()}
    return value
