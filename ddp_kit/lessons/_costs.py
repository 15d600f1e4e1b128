"""What one operation costs, by message size, and the two numbers behind it: alpha and beta."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from statistics import median

import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.model import fit

SIZES = (4, 64, 1_000, 16_000, 256_000, 4_000_000, 64_000_000)  # bytes
SMALL = 1_000_000  # bytes; below it a round is quick, and many are needed
ALPHA, BETA = "\N{GREEK SMALL LETTER ALPHA}", "\N{GREEK SMALL LETTER BETA}"
Series = list[tuple[int, float]]


def ping_pong(tensor: torch.Tensor) -> None:
    """Send a tensor from rank 0 to rank 1 and back. Other ranks look on."""
    rank = dist.get_rank()
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def broadcast(tensor: torch.Tensor) -> None:
    """Copy rank 0's tensor to every rank."""
    dist.broadcast(tensor, src=0)


TIMED: dict[str, Callable[[torch.Tensor], None]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": broadcast,
    "send and back": ping_pong,
}


def measure(
    rank: int,
    world_size: int,
    operation: Callable[[torch.Tensor], None],
    sizes: Iterable[int],
    dtype: torch.dtype = torch.float32,
    most: int = 10,
) -> list[float]:
    """Time an operation at each size on this rank: the median of several rounds, in seconds.

    A barrier stands before each round, and the first round warms up. most: rounds at small
    sizes; large ones have three.
    """
    medians = []
    for nbytes in sizes:
        tensor = torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype, device=device())
        seconds = []
        for _ in range(1 + (most if nbytes < SMALL else 3)):
            dist.barrier()
            start = time.perf_counter()
            operation(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        medians.append(median(seconds[1:]))
    return medians


def series(
    run: Callable,
    operation: str,
    sizes: Iterable[int] = SIZES,
    dtype: torch.dtype = torch.float32,
) -> Series:
    """Return pairs of bytes and seconds, on the slowest rank; a message there and back counts half.

    run: calls a worker on all ranks, such as `functools.partial(kit.run, world_size=2)`.
    operation: a name in TIMED.
    """
    sizes = tuple(sizes)
    per_rank = list(run(measure, TIMED[operation], sizes, dtype))
    share = 0.5 if operation == "send and back" else 1.0
    slowest = (share * max(times) for times in zip(*per_rank, strict=True))
    return list(zip(sizes, slowest, strict=True))


def told(points: Iterable[tuple[int, float]]) -> str:
    """Write alpha in microseconds, and beta in nanoseconds a byte and as GB/s."""
    alpha, beta = fit(points)
    rate = 1e-9 / beta if beta else math.inf
    return (
        f"{ALPHA} = {1e6 * alpha:7,.0f} µs   {BETA} = {1e9 * beta:6.3f} ns a byte ({rate:.2f} GB/s)"
    )
