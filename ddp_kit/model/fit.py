"""Alpha and beta, fitted to measured times."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ddp_kit.errors import ModelError
from ddp_kit.model.all_reduce import Link, check_times


def fit(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return alpha, in seconds, and beta, in seconds per byte, of the line alpha + beta * bytes.

    points: pairs of bytes and measured seconds. The line minimises the squares of the *relative*
    errors: each point is divided by its time, so that a microsecond counts as much for a small
    message as a millisecond for a large one. Neither number may be negative: if one of the best
    line is, it is set to 0 and only the other one is fitted. Raises ModelError for fewer than two
    sizes.
    """
    points = list(points)
    for nbytes, _ in points:
        check_times(bytes=nbytes)
    sizes = sorted({nbytes for nbytes, _ in points})
    if len(sizes) < 2:
        raise ModelError(f"a line needs at least two sizes, got {sizes}")
    return _least_squares([(1.0, nbytes, seconds) for nbytes, seconds in points])


def fit_link(
    points: Iterable[tuple[int, float, float]], cost: Callable[[int, float, float, float], float]
) -> Link:
    """Return the link on which an algorithm would take the measured times; errors as in `fit`.

    points: ranks, bytes and measured seconds of each all_reduce. cost: a function such as
    `chunked_ring`, called with n, nbytes, alpha and beta.
    """
    points = list(points)
    sizes = sorted({(n, nbytes) for n, nbytes, _ in points})
    if len(sizes) < 2:
        raise ModelError(f"a link needs at least two sizes or numbers of ranks, got {sizes}")
    rows = [(cost(n, size, 1, 0), cost(n, size, 0, 1), seconds) for n, size, seconds in points]
    return Link(*_least_squares(rows))


def _least_squares(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Return alpha and beta of messages * alpha + bytes * beta = seconds."""
    if not any(messages or nbytes for messages, nbytes, _ in rows):
        raise ModelError("no message was sent in these runs; measure at least two ranks")
    for _, _, seconds in rows:
        check_times(seconds=seconds)
        if seconds == 0:
            raise ModelError(f"a measured time must be more than 0, got {seconds!r}")
    scale = (
        max(nbytes for _, nbytes, _ in rows) or 1.0
    )  # so that both columns have similar magnitudes
    a = [messages / seconds for messages, _, seconds in rows]
    b = [nbytes / scale / seconds for _, nbytes, seconds in rows]
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    determinant = aa * bb - ab * ab
    if determinant > 0:
        alpha = (sum(a) * bb - sum(b) * ab) / determinant
        beta = (sum(b) * aa - sum(a) * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta / scale
    alone = [(sum(a) / aa if aa else 0.0, 0.0), (0.0, sum(b) / bb if bb else 0.0)]
    alpha, beta = min(alone, key=lambda line: _squared_error(a, b, line))
    return alpha, beta / scale


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _squared_error(a: list[float], b: list[float], line: tuple[float, float]) -> float:
    return sum((line[0] * x + line[1] * y - 1) ** 2 for x, y in zip(a, b, strict=True))
