"""What communication costs, as formulas: plain functions of ranks, bytes, alpha and beta.

    alpha   seconds that a message takes, however short it is
    beta    seconds that each byte adds; its reciprocal is the bandwidth
    gamma   seconds to add one byte; 0 if adding is free or included in beta

The functions in `all_reduce` return the seconds of one all_reduce, `ddp_step` those of a training
step. `fit` and `fit_link` find alpha and beta from measured times. Nothing here starts a process.
"""

from ddp_kit.model.all_reduce import (
    Link,
    chunked_ring,
    halving_doubling,
    naive_ring,
    on_cores,
    rounds,
    tree,
    two_level,
)
from ddp_kit.model.fit import fit, fit_link
from ddp_kit.model.step import buckets, ddp_step

__all__ = [
    "Link",
    "buckets",
    "chunked_ring",
    "ddp_step",
    "fit",
    "fit_link",
    "halving_doubling",
    "naive_ring",
    "on_cores",
    "rounds",
    "tree",
    "two_level",
]
