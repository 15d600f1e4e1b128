"""Reading what a picture is drawn from: a result, a trace, an error, named measurements.

Each function raises PlotError if it is given something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ddp_kit.errors import PlotError
from ddp_kit.failures import Wait
from ddp_kit.trace import Trace


def read_ranks(result: Any) -> list[Any]:
    """Return what every rank returned."""
    try:
        ranks = list(result)
    except TypeError:
        raise PlotError(
            f"needs a result or a list with one value per rank, got {result!r}"
        ) from None
    if not ranks:
        raise PlotError("the result is empty: there is no rank to draw")
    return ranks


def read_trace(source: Any) -> Trace:
    """Return the trace of a result or an error, or the trace that was given."""
    trace = source if isinstance(source, Trace) else getattr(source, "trace", None)
    if not isinstance(trace, Trace):
        raise PlotError(f"needs a trace, a result or an error with a .trace, got {source!r}")
    return trace


def read_waits(error: Any) -> dict[int, Wait]:
    """Return where each stuck rank of an error waits, by rank."""
    if not hasattr(error, "waits"):
        raise PlotError(f"needs an error with .waits, got {error!r}")
    if not error.waits:
        raise PlotError("no rank waits: there is nothing to draw")
    return {wait.rank: wait for wait in sorted(error.waits, key=lambda wait: wait.rank)}


def read_named(name: str, values: Any, content: str) -> Mapping[str, Any]:
    """Return the mapping that the argument `name` must be; content: what it maps."""
    if not isinstance(values, Mapping):
        raise PlotError(f"{name} must map {content}, got {type(values).__name__}")
    if not values:
        raise PlotError(f"{name} is empty: there is nothing to draw")
    return values


def read_points(
    name: str, pairs: Iterable[tuple[int, float]], unit: str, factor: float
) -> dict[int, float]:
    """Return the points of one series in order, with `factor` times each value.

    unit: what the first number of a pair counts, "bytes" or "ranks".
    """
    points: dict[int, float] = {}
    for at, value in pairs:
        if not at > 0 or not 0 < value < math.inf:
            raise PlotError(
                f"{name!r} has {value} for {at} {unit}: both must be positive and finite"
            )
        if at in points:
            raise PlotError(f"{name!r} has {at} {unit} twice: give one value for each number")
        points[at] = factor * value
    if not points:
        raise PlotError(f"{name!r} has no points")
    return dict(sorted(points.items()))
