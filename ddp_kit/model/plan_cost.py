"""What a plan costs: bytes that a rank holds, by kind, and seconds of a training step, by part.

Memory. Sources: Rajbhandari et al., "ZeRO" (2020), https://arxiv.org/abs/1910.02054, for
parameters, gradients and optimizer; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), https://arxiv.org/abs/2205.05198, for activations, equation 2 and table
2, there with 16 bits, dropout and an MLP of 4 * width; torchtitan,
https://arxiv.org/abs/2410.06511, for selective recomputation, and for what ZeRO keeps under a
pipeline.

Time. A layer computes for as long as its matrix products take at `efficiency` times the peak, and
then its activations are written and read once in the memory of the accelerator; backward takes
twice as long. Nothing overlaps but the communication of data parallelism. Sources: Narayanan et al.
(2021), https://arxiv.org/abs/2104.04473, for what is sent and the bubble; Korthikanti et al. for
the activations. Not counted: the optimizer, the embedding, the loading of data, and waiting for a
slower rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_kit.errors import ModelError
from ddp_kit.model.hardware import Cluster
from ddp_kit.model.plan import MIXED, Plan, Precision, check_plan, stages
from ddp_kit.model.transformer import Transformer


@dataclass(frozen=True)
class Estimate:
    """What a plan costs.

    memory: bytes of the rank that holds most, by kind. step: seconds, by part. mfu: from 0 to 1.
    """

    plan: Plan
    memory: dict[str, float]
    step: dict[str, float]
    mfu: float

    @property
    def nbytes(self) -> float:
        """Bytes of the rank that holds most."""
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.step.values())


def estimate(
    transformer: Transformer, plan: Plan, cluster: Cluster, precision: Precision = MIXED
) -> Estimate:
    """Return what a plan costs, whether it fits or not; ModelError if it cannot be carried out."""
    seconds = step(transformer, plan, cluster, precision)
    done = transformer.flops_per_token * plan.batch * transformer.context / plan.ranks
    used = done / sum(seconds.values()) / cluster.accelerator.flops
    return Estimate(plan, memory(transformer, plan, precision), seconds, used)


# --- memory --------------------------------------------------------------------------------


def memory(
    transformer: Transformer, plan: Plan, precision: Precision = MIXED, stage: int | None = None
) -> dict[str, float]:
    """Return the bytes of a rank by kind, at the moment in a step at which they are most.

    stage: of the pipeline; None: the one that holds most. "gathered parameters" are what stage 3 of
    ZeRO has whole: two layers, of which one computes and one is on its way, and all that is in no
    layer. Under a pipeline, stages 2 and 3 reduce gradients once a step, and stage 3 keeps its
    parameters gathered until then: else both would communicate in each micro-batch. "logits" are
    those of the loss in backward, "recomputed activations" those of one layer in one micro-batch:
    only the larger of the two counts, because they are never there together. Not counted: buffers
    of collectives, temporary tensors, and what the allocator wastes.

    Raises ModelError if the model cannot be shared so, or there is no such stage.
    """
    check_plan(transformer, plan)
    if stage is not None:
        if stage not in range(plan.pp):
            raise ModelError(f"stage must be from 0 to {plan.pp - 1}, got {stage!r}")
        return _memory(transformer, plan, precision, stage)
    # Of equal stages in the middle, the first has most micro-batches on the way.
    found = [_memory(transformer, plan, precision, each) for each in _kinds(plan)]
    return max(found, key=lambda kinds: sum(kinds.values()))


def _memory(
    transformer: Transformer, plan: Plan, precision: Precision, stage: int
) -> dict[str, float]:
    layers, last = stages(transformer.layers, plan.pp)[stage], stage == plan.pp - 1
    layer = transformer.layer_weights / plan.tp + transformer.layer_vectors
    rest = _embedding(transformer, plan) if stage == 0 else 0.0
    if last:
        rest += transformer._norm
        if not (transformer.tied and plan.pp == 1):
            rest += transformer.head / plan.tp
    parameters = layers * layer + rest
    gathered = rest + (min(layers, 2) if plan.pp == 1 else layers) * layer
    shared = plan.dp * plan.cp
    kept = activations(transformer, plan, precision)
    found = {
        "parameters": parameters * precision.parameters / (shared if plan.zero == 3 else 1),
        "gathered parameters": gathered * precision.activations * (plan.zero == 3),
        "gradients": parameters * precision.gradients,
        "optimizer": parameters * precision.optimizer / (shared if plan.zero >= 1 else 1),
        "activations": _in_flight(plan, stage) * layers * kept,
        "logits": 0.0,
        "recomputed activations": 0.0,
    }
    if plan.zero >= 2 and plan.pp == 1:
        found["gradients"] /= shared
    if plan.recompute in ("selective", "full"):
        found["recomputed activations"] = _whole_layer(transformer, plan, precision)
    if last:
        found["activations"] += _head(transformer, plan, precision)
        found["logits"] = _logits(transformer, plan, precision)
        smaller = min("logits", "recomputed activations", key=found.__getitem__)
        found[smaller] = 0.0
    return found


def _embedding(transformer: Transformer, plan: Plan) -> float:
    """Return a rank's parameters before the first layer; positions are on all tp ranks."""
    return transformer.embeddings - transformer.head * (1 - 1 / plan.tp)


def _in_flight(plan: Plan, stage: int) -> float:
    """Return how many micro-batches a stage has begun and not finished, at most.

    1F1B; interleaved, it is counted in chunks.
    """
    ahead = plan.pp - stage
    if plan.chunks == 1:
        return min(plan.micro_batches, ahead)
    chunks = 2 * (ahead - 1) + (plan.chunks - 1) * plan.pp + 1
    return min(plan.micro_batches * plan.chunks, chunks) / plan.chunks


def activations(transformer: Transformer, plan: Plan, precision: Precision = MIXED) -> float:
    """Return the bytes that a layer keeps of one micro-batch for its backward, on one rank."""
    shared = plan.tp if plan.sequence_parallel else 1
    if plan.recompute == "full":
        numbers = transformer.width / shared
    elif plan.recompute == "selective":
        # The input, and with tp what two reduce_scatters return; queries, values, the attention's
        # output and the first product of the MLP; of three also the last, before it is reduced.
        cut = 2 * transformer.width + transformer.kv_width + transformer.mlp_width
        numbers = (3 if plan.tp > 1 else 1) * transformer.width / shared + cut / plan.tp
        numbers += transformer.gated * transformer.width
    else:
        return _whole_layer(transformer, plan, precision)
    return tokens(transformer, plan) * numbers * precision.activations


def _whole_layer(transformer: Transformer, plan: Plan, precision: Precision) -> float:
    """Return the same as `activations`, but of a layer that is not recomputed as a whole."""
    found = besides_scores(transformer, plan, precision)
    if not plan.flash and plan.recompute != "attention":
        found += scores(transformer, plan, precision)
    return found


def besides_scores(transformer: Transformer, plan: Plan, precision: Precision) -> float:
    """Return the bytes of what a layer computes in one micro-batch, but not of attention scores."""
    width, masks = transformer.width, 2 * transformer.width * transformer.dropout
    # Inputs of two norms and of what follows them: all tp ranks need them.
    everywhere = 4 * width * precision.activations + masks
    # Queries, keys, values, the attention's output; in the MLP, what goes into the second matrix
    # and into the function before it, and with a gate its other factor. A fused SwiGLU computes
    # the output of that function again.
    split = 2 * width + 2 * transformer.kv_width + (2 + transformer.gated) * transformer.mlp_width
    everywhere /= plan.tp if plan.sequence_parallel else 1
    return tokens(transformer, plan) * (everywhere + split * precision.activations / plan.tp)


def scores(transformer: Transformer, plan: Plan, precision: Precision) -> float:
    """Return the bytes of a layer's attention scores, with dropout also of its mask and output."""
    each = precision.activations + transformer.dropout * (1 + precision.activations)
    each *= transformer.heads * transformer.context
    return tokens(transformer, plan) * each / plan.tp


def tokens(transformer: Transformer, plan: Plan) -> float:
    """Return the tokens of a micro-batch on one rank."""
    return plan.micro_batch * transformer.context / plan.cp


def _head(transformer: Transformer, plan: Plan, precision: Precision) -> float:
    """Return the bytes that the last norm and the head keep of one micro-batch."""
    shared = plan.tp if plan.sequence_parallel else 1
    return tokens(transformer, plan) * 2 * transformer.width * precision.activations / shared


def _logits(transformer: Transformer, plan: Plan, precision: Precision) -> float:
    """Return the bytes of the logits when the loss goes backward, in float32 at least.

    The log-probabilities that the loss has kept, their gradient, and the logits'; where the
    vocabulary is cut, PyTorch's loss_parallel needs one more.
    """
    each = max(4.0, precision.activations) * (3 + (plan.tp > 1))
    return tokens(transformer, plan) * each * transformer.vocabulary / plan.tp


# --- time ----------------------------------------------------------------------------------


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
