"""What training costs, as formulas of plain numbers: no process is started, nothing is measured.

    communication  seconds of an all_reduce, by algorithm, and of a step of DDP; alpha and beta,
                   found in measured times
    transformer    parameters and FLOPs of a transformer
    hardware       accelerators, hosts and links
    plan           how many ranks share what: data, ZeRO, tensor, pipeline, context parallel
    plan_cost      bytes that a rank holds, by kind; seconds of a training step, by part
    planner        all plans for a number of accelerators, the fastest first

All names below are those of the package: `model.chunked_ring`, `model.Transformer`, `model.plans`.
"""

from ddp_kit.model.communication import (
    MIB,
    Link,
    Round,
    buckets,
    chunked_ring,
    ddp_step,
    fit,
    fit_link,
    halving_doubling,
    halving_doubling_on_hosts,
    naive_ring,
    on_cores,
    rounds,
    tree,
    two_level,
)
from ddp_kit.model.hardware import DGX_A100, DGX_H100, Accelerator, Cluster
from ddp_kit.model.plan import FP32, MIXED, Plan, Precision, stages
from ddp_kit.model.plan_cost import Estimate, activations, estimate, memory, step
from ddp_kit.model.planner import Plans, plans
from ddp_kit.model.transformer import Transformer

__all__ = [
    "DGX_A100",
    "DGX_H100",
    "FP32",
    "MIB",
    "MIXED",
    "Accelerator",
    "Cluster",
    "Estimate",
    "Link",
    "Plan",
    "Plans",
    "Precision",
    "Round",
    "Transformer",
    "activations",
    "buckets",
    "chunked_ring",
    "ddp_step",
    "estimate",
    "fit",
    "fit_link",
    "halving_doubling",
    "halving_doubling_on_hosts",
    "memory",
    "naive_ring",
    "on_cores",
    "plans",
    "rounds",
    "stages",
    "step",
    "tree",
    "two_level",
]
