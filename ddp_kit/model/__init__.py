"""What communication costs, as formulas: plain functions of ranks, bytes, alpha and beta.

    alpha   seconds that a message takes however short it is
    beta    seconds that each byte adds; its reciprocal is the bandwidth
    gamma   seconds to add up one byte; 0 where adding is free or counted in beta

A function of `all_reduce` tells the seconds of one all_reduce, `ddp_step` those of a training step,
and `fit` gets alpha and beta out of measured times. Nothing here needs a process or a tensor.
"""

from ddp_kit.model.all_reduce import (
    Link,
    chunked_ring,
    halving_doubling,
    naive_ring,
    tree,
    two_level,
)

__all__ = [
    "Link",
    "chunked_ring",
    "halving_doubling",
    "naive_ring",
    "tree",
    "two_level",
]
