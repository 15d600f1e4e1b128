"""All ranks on one machine: they take turns on its cores."""

from __future__ import annotations

from collections.abc import Callable

from ddp_kit.errors import ModelError
from ddp_kit.model.all_reduce import (
    check_count,
    check_times,
    chunked_ring,
    halving_doubling,
    naive_ring,
    tree,
)

Round = tuple[int, float]  # how many messages are under way at once, and the bytes of each


def rounds(all_reduce: Callable, n: int, nbytes: float) -> list[Round]:
    """Return the rounds of an all_reduce: messages at once over all ranks, and bytes of each.

    all_reduce: `naive_ring`, `chunked_ring`, `tree` or `halving_doubling`.
    """
    check_count("n", n)
    check_times(nbytes=nbytes)
    if all_reduce not in _ROUNDS:
        known = ", ".join(function.__name__ for function in _ROUNDS)
        raise ModelError(f"all_reduce must be one of {known}, got {all_reduce!r}")
    return _ROUNDS[all_reduce](n, nbytes)


def on_cores(
    all_reduce: Callable, n: int, nbytes: float, alpha: float, beta: float, cores: int
) -> float:
    """Return the seconds of an all_reduce among n ranks that share the cores of one machine.

    There a message is work for the processor. So a round lasts longer by messages / cores when
    more messages are under way than there are cores; a ring of n ranks by n / cores. With cores
    for all, this is the time on a network.
    """
    check_count("cores", cores)
    check_times(alpha=alpha, beta=beta)
    return sum(
        (alpha + beta * size) * max(1, messages / cores)
        for messages, size in rounds(all_reduce, n, nbytes)
    )


def _naive_ring(n: int, nbytes: float) -> list[Round]:
    return [(n, nbytes)] * (n - 1)


def _chunked_ring(n: int, nbytes: float) -> list[Round]:
    return [(n, nbytes / n)] * (2 * (n - 1))


def _tree(n: int, nbytes: float) -> list[Round]:
    distances = [2**level for level in range((n - 1).bit_length())]
    up = [(len(range(distance, n, 2 * distance)), nbytes) for distance in distances]
    return up + up[::-1]


def _halving_doubling(n: int, nbytes: float) -> list[Round]:
    levels = n.bit_length() - 1
    halves = [(2**levels, nbytes / 2 ** (level + 1)) for level in range(levels)]
    partners = [(n - 2**levels, nbytes)] if n > 2**levels else []
    return partners + halves + halves[::-1] + partners


_ROUNDS: dict[Callable, Callable[[int, float], list[Round]]] = {
    naive_ring: _naive_ring,
    chunked_ring: _chunked_ring,
    tree: _tree,
    halving_doubling: _halving_doubling,
}
