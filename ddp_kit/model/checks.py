"""What the numbers given to a model must be."""

from __future__ import annotations

import math

from ddp_kit.errors import ModelError


def check_count(name: str, value: int) -> None:
    """Raise ModelError unless `value` is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_times(**values: float) -> None:
    """Raise ModelError if a value is negative, infinite or not a number."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ModelError(f"{name} must be a number of at least 0, got {value!r}")
