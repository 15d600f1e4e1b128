"""What communication costs, as formulas: plain functions of ranks, bytes, alpha and beta.

    n       ranks
    nbytes  bytes in each rank's tensor
    alpha   seconds that a message takes, however short it is
    beta    seconds that each byte adds; its reciprocal is the bandwidth

The first functions return the seconds of one all_reduce, by algorithm; `on_cores` those on the
cores of one machine, `ddp_step` those of a training step; `fit` and `fit_link` find alpha and beta
in measured times. Nothing here starts a process.

A rank sends one message at a time and receives one at a time, both at once, and every pair of
ranks is equally far apart. With alpha=1 and beta=0 a function counts the messages that follow one
another; with alpha=0 and beta=1, their bytes.

Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005), for the model, the tree and halving-doubling; P. Patarasuk and
X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009), for the
chunked ring; H. Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a
Flash" (2018), for two levels; S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training" (VLDB 2020), for buckets and for the overlap of their all_reduce with the
backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, pvariance

from ddp_kit.errors import ModelError

MIB = 2**20


@dataclass(frozen=True)
class Link:
    """What a message costs on one kind of link.

    alpha: seconds per message. beta: seconds per byte.
    """

    alpha: float
    beta: float

    def __post_init__(self):
        check_times(alpha=self.alpha, beta=self.beta)


def naive_ring(n: int, nbytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of the tutorial's ring: the whole tensor travels n-1 times."""
    _check(n, nbytes, alpha, beta)
    return (n - 1) * (alpha + nbytes * beta)


def chunked_ring(n: int, nbytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of a ring with n chunks: reduce-scatter, then all-gather.

    Each rank sends 2(n-1)/n * nbytes, the least possible for the busiest rank of an all_reduce
    made of messages (Patarasuk and Yuan, 2009). But the number of messages, 2(n-1), grows with n.
    """
    _check(n, nbytes, alpha, beta)
    return (n - 1) * (2 * alpha + nbytes / n * 2 * beta)


def tree(n: int, nbytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of a reduce up a binomial tree and a broadcast down again.

    There are ceil(log2 n) levels each way, and each of them moves the whole tensor.
    """
    _check(n, nbytes, alpha, beta)
    return (n - 1).bit_length() * (2 * alpha + nbytes * 2 * beta)


def halving_doubling(n: int, nbytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of recursive halving and doubling, Rabenseifner's algorithm.

    Ranks at distance n/2 swap halves, those at n/4 quarters, and so on; then all the way back.
    That sends as few bytes as the chunked ring, in 2 log2(n) messages. If n is not a power of
    two, the ranks above the largest power of two below n first send their whole tensor to a
    partner, and receive the sum at the end: two more messages of the whole tensor.
    """
    _check(n, nbytes, alpha, beta)
    levels = n.bit_length() - 1
    core = 2**levels
    seconds = 2 * levels * alpha + (core - 1) / core * nbytes * 2 * beta
    if core < n:
        seconds += 2 * alpha + nbytes * 2 * beta
    return seconds


def two_level(n: int, nbytes: float, per_host: int, inside: Link, between: Link) -> float:
    """Return the seconds of a hierarchy: rings inside the hosts, and rings between them.

    First each host does a reduce-scatter; then the ranks that hold the same piece, one per host,
    all_reduce it; then each host does an all-gather. All rings between the hosts run at once and
    share the one link of a host, so that link carries 2(h-1)/h * nbytes each way for h hosts.

    per_host: ranks in each host; n must be a multiple of it, or no larger. inside: the link
    between two ranks of a host. between: the link between two hosts, shared by their ranks.
    """
    _check(n, nbytes, inside.alpha, inside.beta)
    per_host, hosts = _on_hosts(n, per_host)
    at_home = chunked_ring(per_host, nbytes, inside.alpha, inside.beta)
    return at_home + chunked_ring(hosts, nbytes, between.alpha, between.beta)


def halving_doubling_on_hosts(
    n: int, nbytes: float, per_host: int, inside: Link, between: Link, near_first: bool = False
) -> float:
    """Return the seconds of `halving_doubling` if `per_host` ranks share the link of their host.

    All ranks of a host send at the same time. So a piece that leaves the host takes per_host times
    as long as on a link of its own. The links are those of `two_level`; n and per_host must be
    powers of two. near_first: halves are swapped with the nearest rank and the smallest pieces
    with the farthest, so that a host's link carries as little as in `two_level`.
    """
    _check(n, nbytes, inside.alpha, inside.beta)
    per_host, _ = _on_hosts(n, per_host)
    if n & (n - 1) or per_host & (per_host - 1):
        raise ModelError(f"n and per_host must be powers of two, got {n} and {per_host}")
    seconds, levels = 0.0, n.bit_length() - 1
    for level in range(levels):
        distance = 2 ** (level if near_first else levels - level - 1)
        link, flows = (inside, 1) if distance < per_host else (between, per_host)
        seconds += 2 * (link.alpha + flows * nbytes / 2 ** (level + 1) * link.beta)
    return seconds


def _on_hosts(n: int, per_host: int) -> tuple[int, int]:
    """Return how many of n ranks are on one host, and the number of hosts."""
    check_count("per_host", per_host)
    per_host = min(n, per_host)
    hosts, left_over = divmod(n, per_host)
    if left_over:
        raise ModelError(f"n must be a multiple of per_host={per_host}, got {n}")
    return per_host, hosts


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


def _tree_rounds(n: int, nbytes: float) -> list[Round]:
    distances = [2**level for level in range((n - 1).bit_length())]
    up = [(len(range(distance, n, 2 * distance)), nbytes) for distance in distances]
    return up + up[::-1]


def _halving_doubling_rounds(n: int, nbytes: float) -> list[Round]:
    levels = n.bit_length() - 1
    halves = [(2**levels, nbytes / 2 ** (level + 1)) for level in range(levels)]
    partners = [(n - 2**levels, nbytes)] if n > 2**levels else []
    return partners + halves + halves[::-1] + partners


_ROUNDS: dict[Callable, Callable[[int, float], list[Round]]] = {
    naive_ring: lambda n, nbytes: [(n, nbytes)] * (n - 1),
    chunked_ring: lambda n, nbytes: [(n, nbytes / n)] * (2 * (n - 1)),
    tree: _tree_rounds,
    halving_doubling: _halving_doubling_rounds,
}


def buckets(nbytes: float | Sequence[float], bucket_cap_mb: float | None = None) -> list[float]:
    """Return the bytes of the buckets that DDP cuts gradients into, in the order it sends them.

    As in DDP, from its second backward on: a bucket is closed once it has reached its limit, so it
    may exceed it by a part of a parameter.

    nbytes: of each parameter's gradient, in the order in which they are ready, which is mostly the
    reverse of their use; or of all together, which are then cut as if parameters were tiny.
    bucket_cap_mb: the limit of every bucket, in MiB. None, the default of DDP: 1 MiB for the first
    bucket, so that it is sent early, and 25 MiB for the others.
    """
    if bucket_cap_mb == 0:
        raise ModelError("bucket_cap_mb must be more than 0")
    check_times(bucket_cap_mb=bucket_cap_mb or 25)
    limits = (1 * MIB, 25 * MIB) if bucket_cap_mb is None else (bucket_cap_mb * MIB,) * 2
    sizes: list[float] = []
    if isinstance(nbytes, Sequence):
        full = True
        for parameter in nbytes:
            check_times(nbytes=parameter)
            sizes = [*sizes, parameter] if full else [*sizes[:-1], sizes[-1] + parameter]
            full = sizes[-1] >= limits[len(sizes) > 1]
        return sizes
    check_times(nbytes=nbytes)
    while nbytes > 0:
        sizes.append(min(nbytes, limits[len(sizes) > 0]))
        nbytes -= sizes[-1]
    return sizes


def ddp_step(
    n: int,
    buckets: Sequence[float],
    forward: float,
    backward: float,
    cost: Callable[[int, float], float],
    ready: Sequence[float] | None = None,
) -> float:
    """Return the seconds of a forward and a backward during which gradients are averaged.

    Buckets are all_reduced one after the other, each as soon as it is full and the one before it is
    done. The backward continues meanwhile at full speed. The step ends when both have ended.

    n: ranks. buckets: bytes of each, in the order in which they are sent. forward, backward:
    seconds of computing on one rank. cost: seconds of one all_reduce of n ranks and nbytes, such
    as `partial(chunked_ring, alpha=5e-6, beta=4e-11)`. ready: when each bucket is full, as a share
    of the backward; None: gradients are produced at a steady rate. All 1: no overlap.
    """
    check_count("n", n)
    check_times(forward=forward, backward=backward)
    for size in buckets:
        check_times(bucket=size)
    if ready is None:
        ready = [size / (sum(buckets) or 1) for size in accumulate(buckets)]
    elif len(ready) != len(buckets) or not all(0 <= share <= 1 for share in ready):
        raise ModelError(f"ready must hold {len(buckets)} shares from 0 to 1, got {list(ready)}")
    free = 0.0  # when the network is free again, counted from the start of the backward
    for size, share in zip(buckets, ready, strict=True):
        free = max(free, share * backward) + cost(n, size)
    return forward + max(backward, free)


def _check(n: int, nbytes: float, alpha: float, beta: float) -> None:
    check_count("n", n)
    check_times(nbytes=nbytes, alpha=alpha, beta=beta)


# Alpha and beta, found in measured times


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


def _fit_logs(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return alpha and beta of messages * alpha + bytes * beta = seconds, fitted on logarithms.

    For a given ratio of alpha and beta, the best curve is shifted by the mean distance of the
    points from it, and the variance of the distances remains. So only the ratio has to be searched.
    """
    for _, _, seconds in rows:
        check_times(seconds=seconds)
        if seconds == 0:
            raise ModelError(f"a measured time must be more than 0, got {seconds!r}")
    rows = [row for row in rows if row[0] or row[1]]
    if not rows:
        raise ModelError("no message was sent in these runs; measure at least two ranks")

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


# --- what the numbers given to a model must be ------------------------------------------------


def check_count(name: str, value: int) -> None:
    """Raise ModelError unless `value` is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_times(**values: float) -> None:
    """Raise ModelError if a value is negative, infinite or not a number."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ModelError(f"{name} must be a number of at least 0, got {value!r}")
