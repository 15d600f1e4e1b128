"""Training steps that others have measured and published, for comparison with `ddp_kit.model`.

    MEGATRON   Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
               Using Megatron-LM" (2021), https://arxiv.org/abs/2104.04473, table 1
    LLAMA_3    Grattafiori et al., "The Llama 3 Herd of Models" (2024),
               https://arxiv.org/abs/2407.21783, table 4; sizes from table 3

What the papers do not say is assumed: in Megatron's, that a micro-batch is one sequence, that
gradients have 2 bytes, and how many chunks a stage has; in Llama's, how many chunks, and that
gradients are reduced once in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ddp_kit.model import Cluster, Plan, Precision, Transformer


class Megatron(NamedTuple):
    """A row of the table: billions of parameters, sizes, and TFLOP/s of each A100."""

    billions: float
    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    tflops: int


class Llama(NamedTuple):
    """A row of the table: how 405 billion parameters were trained, and TFLOP/s of each H100."""

    gpus: int
    tp: int
    cp: int
    pp: int
    dp: int
    context: int
    batch: int  # sequences of each dp rank
    tflops: int


MEGATRON = [
    Megatron(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    Megatron(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    Megatron(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    Megatron(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    Megatron(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    Megatron(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    Megatron(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    Megatron(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    Megatron(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    Megatron(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]
LLAMA_3 = [
    Llama(8192, 8, 1, 16, 64, 8192, 32, 430),
    Llama(16384, 8, 1, 16, 128, 8192, 16, 400),
    Llama(16384, 8, 16, 16, 8, 131072, 16, 380),
]
FLOAT32_GRADIENTS = Precision(2, 4, 12, 2)  # as in Llama 3


def megatron(row: Megatron, chunks: int = 1) -> tuple[Transformer, Plan]:
    """Return the model and the plan of a row. Every layer is recomputed, as in the paper."""
    transformer = Transformer(row.layers, row.width, row.heads, 51_200, 2_048, dropout=True)
    dp = row.gpus // row.tp // row.pp
    options = {"flash": False, "sequence_parallel": False, "overlap": False}
    plan = Plan(dp, 0, row.tp, row.pp, 1, row.batch // dp, 1, chunks, "full", **options)
    return transformer, plan


def llama(row: Llama, chunks: int = 1) -> tuple[Transformer, Plan]:
    """Return the model and the plan of a row. Nothing is recomputed, as in the paper."""
    sizes = {"kv_heads": 8, "inner": 53_248, "gated": True, "tied": False, "positions": False}
    bare = {"linear_bias": False, "norm_bias": False}
    transformer = Transformer(126, 16_384, 128, 128_256, row.context, **sizes, **bare)
    # The paper shards gradients, too, which is stage 2; stage 1 reduces them once in a step.
    return transformer, Plan(row.dp, 1, row.tp, row.pp, row.cp, row.batch, 1, chunks)


def with_efficiency(cluster: Cluster, efficiency: float) -> Cluster:
    """Return a cluster whose matrix products reach another share of the peak."""
    return replace(cluster, accelerator=replace(cluster.accelerator, efficiency=efficiency))


def fit_efficiency(cluster: Cluster, predict: Callable[[Cluster], float], measured: float) -> float:
    """Return the efficiency with which `predict(cluster)` is what was measured.

    predict: more efficiency never makes it smaller. The answer is between 0.01 and 1.
    """
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if predict(with_efficiency(cluster, middle)) < measured:
            low = middle
        else:
            high = middle
    return (low + high) / 2
