"""The seconds of one training step under DistributedDataParallel.

Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(VLDB 2020), for buckets and for the overlap of their all_reduce with the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from ddp_kit.errors import ModelError
from ddp_kit.model.all_reduce import check_count, check_times

MIB = 2**20


def buckets(nbytes: float, bucket_cap_mb: float = 25) -> list[float]:
    """Return the bytes of the buckets that gradients are cut into, in the order DDP sends them.

    bucket_cap_mb: the size limit of a bucket, in MiB, as for DDP. DDP keeps the first one at 1 MiB,
    so that it can be sent early. Here all but the last are full; real ones hold whole parameters.
    """
    check_times(nbytes=nbytes, bucket_cap_mb=bucket_cap_mb)
    if bucket_cap_mb == 0:
        raise ModelError("bucket_cap_mb must be more than 0")
    sizes: list[float] = []
    while nbytes > 0:
        sizes.append(min(nbytes, (bucket_cap_mb if sizes else min(1, bucket_cap_mb)) * MIB))
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

    Buckets are all_reduced one after the other, each as soon as it is full and the one before it
    is done. The backward continues meanwhile at full speed. The step ends when both have ended.

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
    elif list(ready) != sorted(ready):
        raise ModelError(
            f"ready must not decrease, because buckets are sent in order; got {list(ready)}"
        )
    free = 0.0  # when the network is free again, counted from the start of the backward
    for size, share in zip(buckets, ready, strict=True):
        free = max(free, share * backward) + cost(n, size)
    return forward + max(backward, free)
