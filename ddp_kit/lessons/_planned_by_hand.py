"""The core of `ddp_kit.model` once more, as short as it can be: memory, time of a step, and plans.

It recomputes whole layers or nothing, and its planner tries powers of two only. Sources as there.
"""

from __future__ import annotations

from itertools import product

from ddp_kit import model as formulas
from ddp_kit.model import Cluster, Plan, Precision, Transformer


def states_by_hand(
    parameters: float, n: int, zero: int, precision: Precision = formulas.MIXED
) -> dict[str, float]:
    """Return the bytes of a rank for its parameters, by kind; n ranks share them."""
    kinds = ("optimizer", "gradients", "parameters")  # in the order of the stages that shard them
    return {
        kind: parameters * getattr(precision, kind) / (n if zero >= stage else 1)
        for stage, kind in enumerate(kinds, 1)
    }


def layer_keeps(model: Transformer, plan: Plan, precision: Precision = formulas.MIXED) -> float:
    """Return the bytes that a layer keeps of a micro-batch for its backward, if not recomputed."""
    size, tp = precision.activations, plan.tp
    norms: float = (4 * size + 2 * model.dropout) * model.width  # what goes in and out; masks
    cut: float = 2 * model.width + 2 * model.kv_width + (2 + 2 * model.gated) * model.mlp_width
    cut *= size  # queries, keys, values, output; and the MLP
    if not plan.flash:
        cut += (size + model.dropout * (1 + size)) * model.heads * model.context  # scores
    tokens = plan.micro_batch * model.context / plan.cp
    return tokens * (norms / (tp if plan.sequence_parallel else 1) + cut / tp)


def stage_by_hand(
    model: Transformer, plan: Plan, stage: int, precision: Precision = formulas.MIXED
) -> dict[str, float]:
    """Return the bytes of a rank of a pipeline stage, by kind."""
    layers = formulas.stages(model.layers, plan.pp)[stage]
    first, last, ahead = stage == 0, stage == plan.pp - 1, plan.pp - stage
    layer, head = model.layer_weights / plan.tp + model.layer_vectors, model.head / plan.tp
    parameters = layers * layer + first * (model.embeddings - model.head + head)
    parameters += last * ((1 + model.norm_bias) * model.width + head * (not (first and model.tied)))
    held = states_by_hand(parameters, plan.dp * plan.cp, plan.zero, precision)
    gathered = min(layers, 2) * layer * (plan.zero == 3)  # one computes, one is on its way
    held["gathered parameters"] = gathered * precision.parameters
    tokens = plan.micro_batch * model.context / plan.cp
    inputs = tokens * model.width * precision.activations
    inputs /= plan.tp if plan.sequence_parallel else 1
    whole, again = layer_keeps(model, plan, precision), plan.recompute == "full"
    parts = ahead if plan.chunks == 1 else 2 * (ahead - 1) + (plan.chunks - 1) * plan.pp + 1
    under_way = min(plan.micro_batches, parts / plan.chunks)
    held["activations"] = under_way * layers * (inputs if again else whole)
    held["activations"] += last * (2 * inputs + 4 * tokens * model.vocabulary / plan.tp)
    return held | {"recomputed activations": whole * again}


def memory_by_hand(
    model: Transformer, plan: Plan, precision: Precision = formulas.MIXED
) -> dict[str, float]:
    """Return the bytes of the rank that holds most, by kind."""
    stages = [stage_by_hand(model, plan, stage, precision) for stage in range(plan.pp)]
    return max(stages, key=lambda held: sum(held.values()))


def layer_by_hand(
    model: Transformer, plan: Plan, cluster: Cluster, precision: Precision = formulas.MIXED
) -> dict[str, float]:
    """Return the seconds of a layer for one micro-batch, forward and backward, by part."""
    gpu, again = cluster.accelerator, plan.recompute == "full"
    tokens = plan.micro_batch * model.context / plan.cp
    flops = (2 * model.layer_weights + model.scores_flops) * tokens / plan.tp
    forward = flops / (gpu.flops * gpu.efficiency)
    forward += 2 * layer_keeps(model, plan, precision) / gpu.bandwidth
    sent = tokens * model.width * precision.activations
    keys = 2 * tokens * model.kv_width * precision.activations / plan.tp
    messages = (3 + again) * (plan.cp - 1) + (plan.cp > 1)
    ring = cluster.link(plan.cp, plan.tp)
    return {
        "compute": (3 + again) * forward,
        "tp": (4 + 2 * again) * cluster.all_reduce(plan.tp, sent),
        "cp": messages * (ring.alpha + ring.beta * keys),
    }


def dp_by_hand(
    model: Transformer, plan: Plan, cluster: Cluster, precision: Precision, compute: float
) -> float:
    """Return the seconds of data parallelism that nothing hides; compute: of one micro-batch."""
    layers = max(formulas.stages(model.layers, plan.pp))
    parameters = layers * (model.layer_weights / plan.tp + model.layer_vectors)
    parameters += model.embeddings - model.head + model.head / plan.tp
    n, stride = plan.dp * plan.cp, plan.tp * (plan.pp if plan.cp == 1 else 1)
    reduce = cluster.all_reduce(n, parameters * precision.gradients, stride) / 2
    gather = cluster.all_reduce(n, parameters * precision.parameters, stride) / 2
    forward, backward = plan.overlap * compute / 3, plan.overlap * 2 * compute / 3
    if plan.zero == 0:  # an all_reduce takes as long as two reduce_scatters
        return max(0, 2 * reduce - backward)
    if plan.zero == 3:  # parameters are gathered twice in each micro-batch
        each = max(0, gather - forward) + max(0, gather + reduce - backward)
        return plan.micro_batches * each
    reductions = 1 if plan.zero == 1 else plan.micro_batches
    return reductions * max(0, reduce - backward) + max(0, gather - forward)


def step_by_hand(
    model: Transformer, plan: Plan, cluster: Cluster, precision: Precision = formulas.MIXED
) -> dict[str, float]:
    """Return the seconds of a step by part, for the pipeline stage that has most to do."""
    gpu, tokens = cluster.accelerator, plan.micro_batch * model.context / plan.cp
    layer = layer_by_hand(model, plan, cluster, precision)
    head = 6 * model.head * tokens / plan.tp / (gpu.flops * gpu.efficiency)
    *others, layers = formulas.stages(model.layers, plan.pp)
    if (max(others, default=0) - layers) * sum(layer.values()) > head:
        layers, head = max(others), 0  # the last stage has less to do, though it has the head
    one = {part: layers * seconds for part, seconds in layer.items()}  # of a micro-batch
    one["compute"] += head
    hop = cluster.link(plan.pp, plan.tp * plan.cp)
    sent = tokens * model.width * precision.activations
    sent /= plan.tp if plan.sequence_parallel else 1
    one["pp"] = 2 * plan.chunks * (hop.alpha + hop.beta * sent) * (plan.pp > 1)
    step = {part: plan.micro_batches * seconds for part, seconds in one.items()}
    step["bubble"] = (plan.pp - 1) / plan.chunks * sum(one.values())
    step["dp"] = dp_by_hand(model, plan, cluster, precision, one["compute"])
    return step


def plans_by_hand(
    model: Transformer, cluster: Cluster, gpus: int, batch: int
) -> list[tuple[float, Plan]]:
    """Return the plans that fit into 90 percent of the memory with their seconds, fastest first."""
    found = []
    powers, again = [1, 2, 4, 8, 16], ("none", "full")
    for tp, pp, size, zero, kind in product(powers, powers, (1, 2, 4), range(4), again):
        dp = gpus // (tp * pp)
        if dp * tp * pp != gpus or batch % (dp * size) or (zero and dp == 1):
            continue
        if tp > cluster.per_host or model.key_value_heads % tp or model.layers % pp:
            continue
        plan = formulas.Plan(dp, zero, tp, pp, 1, batch // (dp * size), size, recompute=kind)
        if sum(memory_by_hand(model, plan).values()) <= 0.9 * cluster.accelerator.memory:
            found.append((sum(step_by_hand(model, plan, cluster).values()), plan))
    return sorted(found, key=lambda pair: pair[0])


def tflops(
    model: Transformer, plan: Plan, cluster: Cluster, precision: Precision = formulas.MIXED
) -> float:
    """Return the predicted TFLOP/s of each accelerator; recomputation counts, as in Megatron-LM."""
    flops: float = model.flops_per_token
    if plan.recompute == "full":
        flops += model.layers * (2 * model.layer_weights + model.scores_flops)
    flops *= plan.batch * model.context / plan.ranks
    return flops / sum(step_by_hand(model, plan, cluster, precision).values()) / 1e12
