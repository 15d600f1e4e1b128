"""Seconds of a training step, by part.

A layer computes for as long as its matrix products take at `efficiency` times the peak, and then
its activations are written and read once in the memory of the accelerator; backward takes twice as
long. Nothing overlaps but the communication of data parallelism. Sources: Narayanan et al. (2021),
https://arxiv.org/abs/2104.04473, for what is sent and the bubble; Korthikanti et al. (2022),
https://arxiv.org/abs/2205.05198, for the activations.

Not counted: the optimizer, the embedding, the loading of data, and waiting for a slower rank.
"""

from __future__ import annotations

from ddp_kit.model.hardware import Cluster
from ddp_kit.model.per_rank_memory import _embedding, besides_scores, scores, tokens
from ddp_kit.model.plan import MIXED, Plan, Precision, check_plan, stages
from ddp_kit.model.transformer import Transformer


def step(
    transformer: Transformer, plan: Plan, cluster: Cluster, precision: Precision = MIXED
) -> dict[str, float]:
    """Return the seconds of a step by part, for the pipeline stage that has most to do.

    compute; tp, cp and pp: communication of each kind; bubble: what a stage of the pipeline waits
    for the others; dp: communication of data parallelism that backward does not hide.

    Raises ModelError if the model cannot be shared so.
    """
    check_plan(transformer, plan)
    found = [_micro_batch(transformer, plan, cluster, precision, i) for i in _kinds(plan)]
    slowest = max(found, key=lambda parts: sum(parts.values()))
    seconds = {part: plan.micro_batches * each for part, each in slowest.items()}
    seconds["bubble"] = (plan.pp - 1) / plan.chunks * sum(slowest.values())
    seconds["dp"] = _data_parallel(transformer, plan, cluster, precision, slowest["compute"])
    return seconds


def mfu(
    transformer: Transformer, plan: Plan, cluster: Cluster, precision: Precision = MIXED
) -> float:
    """Return the model FLOPs utilization: the share of the peak that the model's FLOPs take up.

    FLOPs of recomputation do not count.
    """
    seconds = sum(step(transformer, plan, cluster, precision).values())
    done = transformer.flops_per_token * plan.batch * transformer.context / plan.ranks
    return done / seconds / cluster.accelerator.flops


def _kinds(plan: Plan) -> list[int]:
    """Return one stage of each kind: the first, one in the middle, the last."""
    return sorted({0, min(1, plan.pp - 1), plan.pp - 1})


def layer_seconds(
    transformer: Transformer, plan: Plan, cluster: Cluster, precision: Precision = MIXED
) -> float:
    """Return the seconds that a rank computes for a layer of one micro-batch, both ways."""
    gpu, count = cluster.accelerator, tokens(transformer, plan)
    peak = gpu.flops * gpu.efficiency
    attention = transformer.scores_flops * count / plan.tp / peak
    if not plan.flash:
        attention += 2 * scores(transformer, plan, precision) / gpu.bandwidth
    products = 2 * transformer.layer_weights * count / plan.tp / peak
    rest = 2 * besides_scores(transformer, plan, precision) / gpu.bandwidth
    # Forward, and backward, which takes twice as long; and what is computed again.
    again = {
        "none": (0.0, 0.0, 0.0),
        "attention": (1.0, 0.0, 0.0),
        "selective": (0.0, _second_products(transformer), 1.0),
        "full": (1.0, 1.0, 1.0),
    }[plan.recompute]
    return sum(
        (3 + more) * one for more, one in zip(again, (attention, products, rest), strict=True)
    )


def _second_products(transformer: Transformer) -> float:
    """Return the share of a layer's products that selective recomputation computes again.

    Every second one: keys, the attention's last, and one of those of the MLP.
    """
    again = transformer.kv_width + transformer.width + transformer.mlp_width
    return transformer.width * again / transformer.layer_weights


def _micro_batch(
    transformer: Transformer, plan: Plan, cluster: Cluster, precision: Precision, stage: int
) -> dict[str, float]:
    """Return the seconds of a micro-batch on a stage by part, without a bubble."""
    gpu, count = cluster.accelerator, tokens(transformer, plan)
    layers = stages(transformer.layers, plan.pp)[stage]
    compute = layers * layer_seconds(transformer, plan, cluster, precision)
    if stage == plan.pp - 1:
        head = 3 * 2 * transformer.head * count / plan.tp
        compute += head / gpu.flops / gpu.efficiency
    again = plan.recompute == "full"
    nbytes = count * transformer.width * precision.activations
    # An all_reduce after the attention and one after the MLP, in forward and backward.
    reduced = layers * (4 + 2 * again) * cluster.all_reduce(plan.tp, nbytes)
    keys = 2 * nbytes * transformer.kv_width / transformer.width / plan.tp
    ring = cluster.link(plan.cp, plan.tp)
    # Keys and values go round in forward and in backward; their gradients take one step more, home.
    messages = (plan.cp - 1) * (3 + again) + (plan.cp > 1)
    passed = layers * messages * (ring.alpha + ring.beta * keys)
    sent = 0.0
    if plan.pp > 1:
        hop = cluster.link(plan.pp, plan.tp * plan.cp)
        shared = plan.tp if plan.sequence_parallel else 1
        sent = 2 * plan.chunks * (hop.alpha + hop.beta * nbytes / shared)
    return {"compute": compute, "tp": reduced, "cp": passed, "pp": sent}


def _data_parallel(
    transformer: Transformer, plan: Plan, cluster: Cluster, precision: Precision, compute: float
) -> float:
    """Return the seconds of data parallelism's communication that no computation hides.

    compute: seconds of one micro-batch. Backward is two thirds of it. In stages 0 and 1 the last
    backward hides the reduction of gradients, and so in all stages under a pipeline; else each
    backward has one in stages 2 and 3.
    """
    n = plan.dp * plan.cp
    if n == 1:
        return 0.0
    stage = max(stages(transformer.layers, plan.pp))
    count = stage * (transformer.layer_weights / plan.tp + transformer.layer_vectors)
    count += _embedding(transformer, plan)
    # The sum goes over cp and dp ranks; with cp, those of a host are cp ranks.
    stride = plan.tp if plan.cp > 1 else plan.tp * plan.pp
    reduce = cluster.all_reduce(n, count * precision.gradients, stride) / 2
    gather = cluster.all_reduce(n, count * precision.activations, stride) / 2
    forward, backward = (compute / 3 * plan.overlap, 2 * compute / 3 * plan.overlap)
    zero = plan.zero if plan.pp == 1 else min(plan.zero, 1)
    if zero == 3:
        each = max(0, gather - forward) + max(0, gather + reduce - backward)
        return plan.micro_batches * each
    if zero == 2:
        return plan.micro_batches * max(0, reduce - backward) + max(0, gather - forward)
    if zero == 1:
        return max(0, reduce - backward) + max(0, gather - forward)
    return max(0, 2 * reduce - backward)
