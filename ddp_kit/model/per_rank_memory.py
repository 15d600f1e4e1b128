"""Bytes that a rank holds in a training, by kind.

Sources: Rajbhandari et al., "ZeRO" (2020), https://arxiv.org/abs/1910.02054, for parameters,
gradients and optimizer; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), https://arxiv.org/abs/2205.05198, for activations, equation 2 and table 2, there
with 16 bits, dropout and an MLP of 4 * width; torchtitan, https://arxiv.org/abs/2410.06511, for
selective recomputation, and for what ZeRO keeps under a pipeline.
"""

from __future__ import annotations

from ddp_kit.errors import ModelError
from ddp_kit.model.plan import MIXED, Plan, Precision, check_plan, stages
from ddp_kit.model.transformer import Transformer


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
    candidates = {0, min(1, plan.pp - 1), plan.pp - 1}
    found = [_memory(transformer, plan, precision, each) for each in sorted(candidates)]
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
