"""The seconds of one all_reduce, by algorithm: on a network, and on the cores of one machine.

Throughout: n ranks; nbytes in each rank's tensor; alpha in seconds per message; beta and gamma in
seconds per byte sent and per byte added. A rank sends one message at a time and receives one at a
time, both at once, and every pair of ranks is equally far apart. With alpha=1 and beta=0 a
function counts the messages that follow one another; with alpha=0 and beta=1, their bytes.

Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), for the model, the tree and halving-doubling; P. Patarasuk and
X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), for the
chunked ring; H. Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a
Flash" (2018), for two levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ddp_kit.errors import ModelError


@dataclass(frozen=True)
class Link:
    """What a message costs on one kind of link.

    alpha: seconds per message. beta: seconds per byte.
    """

    alpha: float
    beta: float

    def __post_init__(self):
        check_times(alpha=self.alpha, beta=self.beta)


def naive_ring(n: int, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Return the seconds of the tutorial's ring: the whole tensor travels n-1 times."""
    _check(n, nbytes, alpha, beta, gamma)
    return (n - 1) * (alpha + nbytes * (beta + gamma))


def chunked_ring(n: int, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Return the seconds of a ring with n chunks: reduce-scatter, then all-gather.

    Each rank sends 2(n-1)/n * nbytes, the least possible for the busiest rank of an all_reduce
    made of messages (Patarasuk and Yuan, 2009). But the number of messages, 2(n-1), grows with n.
    """
    _check(n, nbytes, alpha, beta, gamma)
    return (n - 1) * (2 * alpha + nbytes / n * (2 * beta + gamma))


def tree(n: int, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Return the seconds of a reduce up a binomial tree and a broadcast down again.

    There are ceil(log2 n) levels each way, and each of them moves the whole tensor.
    """
    _check(n, nbytes, alpha, beta, gamma)
    return (n - 1).bit_length() * (2 * alpha + nbytes * (2 * beta + gamma))


def halving_doubling(n: int, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Return the seconds of recursive halving and doubling, Rabenseifner's algorithm.

    Ranks at distance n/2 swap halves, those at n/4 quarters, and so on; then all the way back.
    That sends as few bytes as the chunked ring, in 2 log2(n) messages. If n is not a power of
    two, the ranks above the largest power of two below n first send their whole tensor to a
    partner, and receive the sum at the end: two more messages of the whole tensor.
    """
    _check(n, nbytes, alpha, beta, gamma)
    levels = n.bit_length() - 1
    core = 2**levels
    seconds = 2 * levels * alpha + (core - 1) / core * nbytes * (2 * beta + gamma)
    if core < n:
        seconds += 2 * alpha + nbytes * (2 * beta + gamma)
    return seconds


def two_level(
    n: int, nbytes: float, per_host: int, inside: Link, between: Link, gamma: float = 0.0
) -> float:
    """Return the seconds of a hierarchy: rings inside the hosts, and rings between them.

    First each host does a reduce-scatter; then the ranks that hold the same piece, one per host,
    all_reduce it; then each host does an all-gather. All rings between the hosts run at once and
    share the one link of a host, so that link carries 2(h-1)/h * nbytes each way for h hosts.

    per_host: ranks in each host; n must be a multiple of it, or no larger. inside: the link
    between two ranks of a host. between: the link between two hosts, shared by their ranks.
    """
    check_count("per_host", per_host)
    _check(n, nbytes, inside.alpha, inside.beta, gamma)
    per_host = min(n, per_host)
    hosts, left_over = divmod(n, per_host)
    if left_over:
        raise ModelError(f"n must be a multiple of per_host={per_host}, got {n}")
    at_home = chunked_ring(per_host, nbytes, inside.alpha, inside.beta, gamma)
    away = chunked_ring(hosts, nbytes, between.alpha, between.beta, gamma / per_host)
    return at_home + away


# --- ranks that share cores ----------------------------------------------------------------


Round = tuple[int, float]  # how many messages are sent at once, and the bytes of each


def rounds(all_reduce: Callable, n: int, nbytes: float) -> list[Round]:
    """Return the rounds of an all_reduce: how many messages are sent at once, and bytes of each.

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

    There a message is work for the processor. So a round with more messages than cores takes
    messages / cores times as long; a ring of n ranks, n / cores times. With a core for every
    rank, this is the time on a network.
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


# --- arguments -----------------------------------------------------------------------------


def check_count(name: str, value: int) -> None:
    """Raise ModelError unless `value` is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_times(**values: float) -> None:
    """Raise ModelError if a value is negative, infinite or not a number."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ModelError(f"{name} must be a number of at least 0, got {value!r}")


def _check(n: int, nbytes: float, alpha: float, beta: float, gamma: float) -> None:
    check_count("n", n)
    check_times(nbytes=nbytes, alpha=alpha, beta=beta, gamma=gamma)
