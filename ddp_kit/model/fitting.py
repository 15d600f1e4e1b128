"""Alpha and beta, found in measured times: a search on logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, pvariance

from ddp_kit.errors import ModelError
from ddp_kit.model.checks import check_times
from ddp_kit.model.communication import Link


def fit(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return alpha, in seconds, and beta, in seconds per byte, of the line alpha + beta * bytes.

    points: pairs of bytes and measured seconds. The line minimises the squares of the differences
    of the *logarithms*: half and twice the measured time are equally wrong, at each size. Neither
    number is negative; one of them may be 0. Raises ModelError for fewer than two sizes.
    """
    points = list(points)
    for nbytes, _ in points:
        check_times(bytes=nbytes)
    sizes = sorted({nbytes for nbytes, _ in points})
    if len(sizes) < 2:
        raise ModelError(f"a line needs at least two sizes, got {sizes}")
    return _fit_logs([(1.0, nbytes, seconds) for nbytes, seconds in points])


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
    return Link(*_fit_logs(rows))


def _fit_logs(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Return alpha and beta of messages * alpha + bytes * beta = seconds, fitted on logarithms."""
    for _, _, seconds in rows:
        check_times(seconds=seconds)
        if seconds == 0:
            raise ModelError(f"a measured time must be more than 0, got {seconds!r}")
    sent = [row for row in rows if row[0] or row[1]]
    if not sent:
        raise ModelError("no message was sent in these runs; measure at least two ranks")
    return best_on_logarithms(sent)


def best_on_logarithms(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return alpha and beta of messages * alpha + bytes * beta = seconds, fitted on logarithms.

    rows: messages, bytes and seconds of each measured time; at least one row, in each of them
    messages or bytes, and seconds, are more than 0.

    For a given ratio of alpha and beta, the best curve is shifted by the mean distance of the
    points from it, and the variance of the distances remains. So only the ratio has to be searched.
    """

    def shifted(alpha: float, beta: float) -> tuple[float, float, float]:
        line = [alpha * messages + beta * nbytes for messages, nbytes, _ in rows]
        if min(line) <= 0:
            return math.inf, alpha, beta
        logs = [math.log(row[2] / time) for row, time in zip(rows, line, strict=True)]
        return pvariance(logs), alpha * math.exp(fmean(logs)), beta * math.exp(fmean(logs))

    ends = [shifted(1.0, 0.0), shifted(0.0, 1.0)]
    if ratios := [messages / nbytes for messages, nbytes, _ in rows if messages and nbytes]:
        low, high, tried = math.log(min(ratios)) - 7, math.log(max(ratios)) + 7, 100
        for _ in range(12):  # around the best ratio so far, on a logarithmic scale
            step = (high - low) / tried
            best = min(range(tried + 1), key=lambda i: shifted(1.0, math.exp(low + i * step))[0])
            ends.append(shifted(1.0, math.exp(low + best * step)))
            low, high, tried = low + (best - 1) * step, low + (best + 1) * step, 20
    _, alpha, beta = min(ends)
    return alpha, beta
