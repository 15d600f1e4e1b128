"""Accelerators, and the links between them.

Memory, FLOP/s in 16 bits and bandwidths of memory are those of the data sheets: NVIDIA A100 80GB
and H100 SXM. NVLink has a peak of 300 and 450 GB/s in each direction; an all_reduce of many GB in a
host of 8 H100 reaches 370 (https://jax-ml.github.io/scaling-book/gpus/), 82 % of it, which is taken
for both. Each A100 has a link of 200 Gbit/s to other hosts, each H100 one of 400 Gbit/s, and these
are peaks. Latencies are assumed. Both efficiencies are fitted, each to
one published step: Megatron-LM's with 1.7 billion parameters on 32 A100, and Llama 3 405B on 8,192
H100, whose pipeline is assumed to have 8 chunks of one layer. Lesson 20 does it, and tests them on
other steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_kit.errors import ModelError
from ddp_kit.model.communication import Link, check_count, check_times, chunked_ring, two_level


@dataclass(frozen=True)
class Accelerator:
    """What an accelerator can do.

    memory: bytes. flops: peak FLOP/s in the precision of the computation. bandwidth: bytes/s of its
    memory. efficiency: share of the peak that matrix products reach; 1: all of it. No data sheet
    has it: fit it to a measured step.
    """

    memory: float
    flops: float
    bandwidth: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("memory", "flops", "bandwidth", "efficiency"):
            check_times(**{name: getattr(self, name)})
            if not getattr(self, name):
                raise ModelError(f"{name} must be more than 0")
        if self.efficiency > 1:
            raise ModelError(f"efficiency must be at most 1, got {self.efficiency!r}")


@dataclass(frozen=True)
class Cluster:
    """Hosts with equally many accelerators.

    inside: the link between two accelerators of a host. between: the link of one accelerator to
    other hosts; each has its own.
    """

    accelerator: Accelerator
    per_host: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        check_count("per_host", self.per_host)

    def all_reduce(self, n: int, nbytes: float, stride: int = 1) -> float:
        """Return the seconds of an all_reduce among n ranks of which one comes every `stride` ones.

        A ring inside a host, two levels of rings over several. All groups of the same kind run at
        the same time. A reduce_scatter or an all_gather takes half as long.
        """
        here = self.ranks_here(n, stride)
        if here == n:
            return chunked_ring(n, nbytes, self.inside.alpha, self.inside.beta)
        together = Link(self.between.alpha, self.between.beta / here)
        return two_level(n, nbytes, here, self.inside, together)

    def ranks_here(self, n: int, stride: int) -> int:
        """Return how many of the n ranks of such a group are on one host."""
        here = min(n, max(1, self.per_host // stride))
        return here if n % here == 0 and self.per_host % stride == 0 else 1

    def link(self, n: int, stride: int) -> Link:
        """Return the slowest link between neighbours in such a group."""
        return self.inside if self.ranks_here(n, stride) == n else self.between


A100 = Accelerator(memory=80e9, flops=312e12, bandwidth=2.039e12, efficiency=0.62)
H100 = Accelerator(memory=80e9, flops=989e12, bandwidth=3.35e12, efficiency=0.56)
DGX_A100 = Cluster(A100, per_host=8, inside=Link(2e-6, 1 / 247e9), between=Link(5e-6, 1 / 25e9))
DGX_H100 = Cluster(H100, per_host=8, inside=Link(2e-6, 1 / 370e9), between=Link(5e-6, 1 / 50e9))
