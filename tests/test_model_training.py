"""Memory and time of training a transformer: against hand-computed values, papers and PyTorch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddp_kit import model
from ddp_kit.errors import ModelError
from ddp_kit.lessons._gpt import Config, batches, loss_of, make_gpt
from ddp_kit.model import FP32, Accelerator, Cluster, Link, Plan, Transformer
from ddp_kit.model.transformer import LLAMA_8B, LLAMA_405B

GPT = Transformer(2, 64, 4, 128, 64, linear_bias=False)  # that of the lessons
GPT_2 = Transformer(12, 768, 12, 50257, 1024)
LLAMA = {"gated": True, "tied": False, "positions": False, "linear_bias": False, "norm_bias": False}
LLAMA_7B = Transformer(32, 4096, 32, 32000, 2048, inner=11008, **LLAMA)
MEGATRON = Transformer(36, 4096, 32, 51200, 2048, dropout=True)  # 7.5 billion parameters
FREE, MESSAGE, BYTE = Link(0, 0), Link(1, 0), Link(0, 1)
QUICK = Accelerator(memory=1e9, flops=1e30, bandwidth=1e30)
plain = {"overlap": False, "flash": False, "sequence_parallel": False}


def costs(link):
    """A cluster in which only messages, or only bytes, take time, a second each."""
    return Cluster(QUICK, 8, link, link)


@pytest.mark.parametrize(
    ("transformer", "count"),
    [
        (GPT_2, 124_439_808),  # counted in OpenAI's weights
        (LLAMA_7B, 6_738_415_616),  # and in Meta's
        (GPT, sum(p.numel() for p in make_gpt().parameters())),
        (
            replace(GPT, layers=3, tied=False, width=32, heads=2),
            sum(p.numel() for p in make_gpt(Config(3, 2, 32, tied=False)).parameters()),
        ),
    ],
)
def test_parameters_are_those_of_real_weights(transformer, count):
    assert transformer.parameters == count


def test_flops_are_those_that_pytorch_counts():
    gpt, batch = make_gpt(), next(batches(3, 1))
    # The plain kernel is made of matrix products, which PyTorch counts.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(gpt, *batch).backward()
    assert counter.get_total_flops() == GPT.flops_per_token * batch[0].numel()


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_memory_is_that_of_the_table_of_zero(zero, gigabytes):
    """ZeRO, figure 1: 7.5 billion parameters on 64 ranks."""
    held = model.memory(MEGATRON, Plan(dp=64, zero=zero))
    states = sum(held[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert states / MEGATRON.parameters * 7.5 == pytest.approx(gigabytes, abs=0.05)
    assert (held["gathered parameters"] > 0) == (zero == 3)


@pytest.mark.parametrize(
    ("options", "formula"),
    [  # Korthikanti et al., table 2: bytes of a layer / (s b h)
        ({"tp": 1}, lambda t, scores: 34 + scores),
        ({"tp": 8}, lambda t, scores: 10 + 24 / t + scores / t),
        ({"tp": 8, "sequence_parallel": True}, lambda t, scores: 34 / t + scores / t),
        (
            {"tp": 8, "sequence_parallel": True, "recompute": "attention"},
            lambda t, scores: 34 / t,
        ),
        ({"tp": 8, "recompute": "full"}, lambda t, scores: 2),
    ],
)
def test_activations_are_those_of_the_table_of_korthikanti(options, formula):
    s, b, h, a = 2048, 4, 4096, 32
    plan = Plan(micro_batch=b, **{**plain, **options})
    expected = s * b * h * formula(plan.tp, 5 * a * s / h)
    assert model.activations(MEGATRON, plan) == pytest.approx(expected)


def test_a_fused_gated_mlp_keeps_both_factors_and_their_product():
    plain_mlp = replace(LLAMA_8B, gated=False)
    tensor = 2 * LLAMA_8B.context * LLAMA_8B.mlp_width  # bytes
    more = model.activations(LLAMA_8B, Plan()) - model.activations(plain_mlp, Plan())
    assert more == tensor


def test_all_kinds_add_up_to_the_whole_model():
    """All ranks of a plan together hold each matrix once, and vectors on every tp rank."""
    tied = replace(GPT, layers=4)
    for pp, tp in product((1, 2, 4), (1, 2, 4)):
        plan = Plan(tp=tp, pp=pp)
        ranks = [model.memory(tied, plan, FP32, stage)["parameters"] for stage in range(pp)]
        once = 4 * tied.layers * tied.layer_weights + 4 * tied.head * (1 + (pp > 1))
        replicated = 4 * (tied.layers * tied.layer_vectors + tied.context * 64 + 2 * 64)
        assert sum(ranks) * tp == pytest.approx(once + tp * replicated)


@pytest.mark.parametrize(("micro_batches", "in_flight"), [(1, 1), (3, 3), (4, 4), (100, 4)])
def test_the_first_of_four_stages_holds_the_micro_batches_that_are_on_the_way(
    micro_batches, in_flight
):
    plan = Plan(pp=4, micro_batches=micro_batches)
    held = model.memory(MEGATRON, plan, stage=0)["activations"]
    assert held == pytest.approx(in_flight * 9 * model.activations(MEGATRON, plan))


def test_interleaved_stages_hold_what_the_formula_of_korthikanti_says():
    p, v = 4, 3
    plan = Plan(pp=p, chunks=v, micro_batches=16)
    held = model.memory(MEGATRON, plan, stage=0)["activations"]
    whole = 36 * model.activations(MEGATRON, plan)
    assert held == pytest.approx(whole * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize(
    ("transformer", "pp", "micro_batches", "fullest"),
    [
        (MEGATRON, 4, 32, 0),  # with most micro-batches on the way
        (LLAMA_405B, 16, 32, 1),  # the first stage has one layer less
        (replace(MEGATRON, vocabulary=10**6), 4, 1, 3),  # with the logits
        (MEGATRON, 1, 1, 0),
    ],
)
def test_memory_is_that_of_the_fullest_stage(transformer, pp, micro_batches, fullest):
    plan = Plan(pp=pp, micro_batches=micro_batches)
    stages = [sum(model.memory(transformer, plan, stage=i).values()) for i in range(pp)]
    assert max(stages) == stages[fullest]
    assert sum(model.memory(transformer, plan).values()) == max(stages)


def test_of_the_logits_and_the_layer_that_is_recomputed_only_the_larger_counts():
    layer = model.activations(MEGATRON, Plan(flash=False))
    logits = 2048 * 51200 * 3 * 4  # the log-probabilities, their gradient and the logits' one
    for vocabulary in (51200, 128):
        held = model.memory(
            replace(MEGATRON, vocabulary=vocabulary), Plan(recompute="full", flash=False)
        )
        large = max(layer, logits * vocabulary / 51200)
        assert held["logits"] + held["recomputed activations"] == large
        assert not held["logits"] or not held["recomputed activations"]


def test_selective_recomputation_keeps_every_second_product_and_the_attention():
    """Of Llama's: input, queries, values, attention, and the first and last of the MLP."""
    d, tokens = 4096, 8192
    kept = model.activations(LLAMA_8B, Plan(recompute="selective"))
    assert kept == 2 * tokens * (4 * d + 1024 + 14336)
    alone = Cluster(Accelerator(1, 1e12, 1e30), 8, FREE, FREE)
    once = model.step(LLAMA_8B, Plan(), alone)["compute"]
    again = model.step(LLAMA_8B, Plan(recompute="selective"), alone)["compute"]
    products = 2 * d * (1024 + d + 14336)  # keys, the attention's last, and one of the MLP
    assert again - once == pytest.approx(32 * tokens * products / 1e12)


def test_a_pipeline_keeps_gradients_whole_and_stage_3_its_parameters():
    plans = [Plan(dp=8, zero=zero, pp=4, micro_batches=8) for zero in (1, 2, 3)]
    one, two, three = (model.memory(MEGATRON, plan, stage=1) for plan in plans)
    assert one["gradients"] == two["gradients"] == three["gradients"]
    assert three["gathered parameters"] == one["parameters"] == 8 * three["parameters"]
    times = [model.step(MEGATRON, plan, costs(BYTE))["dp"] for plan in plans]
    assert times[0] == times[1] == times[2]


# ---- time


def test_tensor_parallel_messages_are_four_all_reduces_a_layer():
    plan = Plan(tp=4, micro_batches=3, **plain)
    assert model.step(MEGATRON, plan, costs(MESSAGE))["tp"] == 3 * 36 * 4 * 2 * 3
    tensor = 2 * 2048 * 4096
    again = replace(plan, recompute="full")
    for each, times in ((plan, 4), (again, 6)):
        sent = model.step(MEGATRON, each, costs(BYTE))["tp"]
        assert sent == pytest.approx(3 * 36 * times * 2 * 3 / 4 * tensor)


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_data_parallel_bytes_are_those_of_zero(zero, times):
    plan = Plan(dp=8, zero=zero, **plain)
    sent = model.step(MEGATRON, plan, costs(BYTE))["dp"]
    matrices = MEGATRON.parameters - 2 * MEGATRON.width  # the last norm does not count
    assert sent == pytest.approx(times * 7 / 8 * 2 * matrices)


def test_stage_2_reduces_each_micro_batch_and_stage_1_only_the_last():
    sent = {
        zero: model.step(MEGATRON, Plan(dp=8, zero=zero, micro_batches=5, **plain), costs(BYTE))
        for zero in (1, 2, 3)
    }
    assert sent[2]["dp"] == pytest.approx(3 * sent[1]["dp"])  # 5 + 1 instead of 1 + 1
    assert sent[3]["dp"] == pytest.approx(7.5 * sent[1]["dp"])  # 5 * 3 instead of 2


def test_a_ring_sends_keys_and_values_three_times_around():
    plan = Plan(cp=4, micro_batches=2, **plain)
    # Three times around, as in lesson 18, and gradients take one step more.
    assert model.step(MEGATRON, plan, costs(MESSAGE))["cp"] == 2 * 36 * (3 * 3 + 1)
    shared = replace(MEGATRON, kv_heads=8)
    keys = 2 * 2 * 1024 * 2048 / 4
    sent = model.step(shared, plan, costs(BYTE))["cp"]
    assert sent == pytest.approx(2 * 36 * (3 * 3 + 1) * keys)


def test_a_pipeline_sends_activations_and_their_gradients():
    plan = Plan(pp=4, micro_batches=4, **plain)
    tensor = 2 * 2048 * 4096
    for chunks in (1, 3):
        each = replace(plan, chunks=chunks)
        assert model.step(MEGATRON, each, costs(MESSAGE))["pp"] == 4 * 2 * chunks
        assert model.step(MEGATRON, each, costs(BYTE))["pp"] == 4 * 2 * chunks * tensor
    shared = replace(plan, tp=2, sequence_parallel=True)
    assert model.step(MEGATRON, shared, costs(BYTE))["pp"] == 4 * 2 * tensor / 2
    assert model.step(MEGATRON, replace(plan, pp=1), costs(BYTE))["pp"] == 0


def test_the_bubble_is_p_minus_1_over_v_m():
    computing = Cluster(Accelerator(1, 1e12, 1e12), 8, FREE, FREE)
    headless = replace(MEGATRON, vocabulary=1)  # the head makes the last stage slower
    for p, m, v in ((4, 8, 1), (4, 8, 3), (2, 1, 1), (1, 5, 1)):
        parts = model.step(headless, Plan(pp=p, micro_batches=m, chunks=v, **plain), computing)
        ideal = sum(parts.values()) - parts["bubble"]
        assert parts["bubble"] == pytest.approx((p - 1) / (v * m) * ideal)


def test_compute_is_worked_out_by_hand():
    gpu = Accelerator(memory=1, flops=1e12, bandwidth=1e9, efficiency=0.5)
    alone = Cluster(gpu, 8, FREE, FREE)
    products = MEGATRON.flops_per_token * 2048 / 0.5e12
    kept = 36 * model.activations(MEGATRON, Plan(flash=False))
    seconds = model.step(MEGATRON, Plan(flash=False), alone)["compute"]
    assert seconds == pytest.approx(products + 3 * 2 * kept / 1e9)
    again = model.step(MEGATRON, Plan(flash=False, recompute="full"), alone)["compute"]
    head = 3 * 2 * MEGATRON.head * 2048 / 0.5e12
    assert again - head == pytest.approx(4 / 3 * (seconds - head))


def test_perfect_use_is_an_mfu_of_1():
    ideal = Cluster(Accelerator(1, 1e12, 1e30), 8, FREE, FREE)
    assert model.estimate(GPT_2, Plan(dp=4, tp=2, cp=2), ideal).mfu == pytest.approx(1)
    assert model.estimate(GPT_2, Plan(recompute="full"), ideal).mfu < 0.85


def test_overlap_hides_at_most_the_backward():
    for zero, hidden in ((0, 2 / 3), (1, 1), (2, 1), (3, 1)):
        slow = Cluster(Accelerator(1, 1e12, 1e30), 8, BYTE, BYTE)
        plan = Plan(dp=8, zero=zero)
        seen = model.step(MEGATRON, plan, slow)
        all_of_it = model.step(MEGATRON, replace(plan, overlap=False), slow)
        assert all_of_it["dp"] - seen["dp"] == pytest.approx(hidden * seen["compute"])
        fast = replace(slow, inside=FREE)
        assert model.step(MEGATRON, plan, fast)["dp"] == 0


def test_groups_over_hosts_pay_for_the_links_between_them():
    hosts = Cluster(QUICK, 8, inside=FREE, between=BYTE)
    assert hosts.all_reduce(8, 1000) == 0
    # 8 links of a host share the 1000 bytes, which cross twice, less what stays
    assert hosts.all_reduce(32, 1000) == pytest.approx(2 * 3 / 4 * 1000 / 8)
    assert hosts.all_reduce(4, 1000, stride=8) == pytest.approx(2 * 3 / 4 * 1000)
    assert hosts.all_reduce(8, 1000, stride=4) == pytest.approx(2 * 3 / 4 * 1000 / 2)
    assert hosts.link(2, 4) == FREE
    assert hosts.link(2, 8) == BYTE


# ---- plans


def test_the_planner_ranks_the_plans_that_fit():
    found = model.plans(MEGATRON, model.DGX_A100, 64, batch=128)
    seconds = [each.seconds for each in found.fitting]
    assert seconds
    both = [(each.seconds, each.nbytes) for each in found.fitting]
    assert both == sorted(both)
    assert len(set(seconds)) < len(seconds)  # some are equally fast
    for each in found.fitting:
        assert each.plan.ranks == 64
        assert each.plan.batch == 128
        assert each.nbytes <= 0.9 * 80e9
        assert each == model.estimate(MEGATRON, each.plan, model.DGX_A100)
    assert Plan(dp=64, zero=3, micro_batches=2) in [each.plan for each in found.fitting]
    by_hand = model.estimate(MEGATRON, Plan(dp=64, zero=1, micro_batches=2), model.DGX_A100)
    assert found.fitting[0].seconds <= by_hand.seconds


def test_the_planner_says_why_nothing_fits():
    found = model.plans(LLAMA_405B, model.DGX_H100, 8, batch=8)
    assert found.fitting == []
    closest, why = found.refused["memory"][0]
    needed = sum(model.memory(LLAMA_405B, closest).values()) / 1e9
    assert why == f"{needed:,.1f} GB are needed, and 72.0 GB may be used"
    assert all(
        sum(model.memory(LLAMA_405B, plan).values()) / 1e9 >= needed
        for plan, _ in found.refused["memory"]
    )
    assert str(found).startswith("8 GPUs: 0 plans fit\n")
    assert f"; the first is {closest}: {why}" in str(found)


def test_the_planner_cuts_sequences_only_where_asked():
    long = replace(MEGATRON, context=8192)

    def plans(**options):
        return model.plans(long, model.DGX_A100, 64, batch=128, **options)

    def sizes(**options):
        return {each.plan.cp for each in plans(**options).fitting}

    assert sizes() == {1}
    assert sizes(cp=(2, 4)) == {2, 4}
    assert sizes(cp=(1, 3)) == {1}  # 3 does not divide 64
    assert sizes(cp=(1, 8)) == {1}
    why = "cp=8 leaves 1,024 tokens of a sequence to a rank, fewer than 2,048"
    assert plans(cp=(8,)).refused["cp"][0][1] == why


TINY = Transformer(6, 8, 4, 12, 16, kv_heads=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Transformer(1, 8, 3, 12, 16), "width must be a multiple of heads=3, got 8"),
        (
            lambda: Transformer(1, 8, 4, 12, 16, kv_heads=3),
            "heads must be a multiple of kv_heads=3, got 4",
        ),
        (lambda: Plan(zero=4), "zero must be 0, 1, 2 or 3, got 4"),
        (
            lambda: Plan(recompute="all"),
            "recompute must be 'none', 'attention', 'selective' or 'full', got 'all'",
        ),
        (lambda: Accelerator(1, 1, 1, 1.5), "efficiency must be at most 1, got 1.5"),
        (lambda: model.memory(TINY, Plan(tp=3)), "tp=3 does not divide heads=4"),
        (lambda: model.stages(6, 5), "6 layers cannot be cut into pp=5 equal stages"),
        (
            lambda: model.memory(TINY, Plan(pp=2, chunks=2, micro_batches=2)),
            "stages of 3 layers cannot be cut into 2 chunks",
        ),
        (
            lambda: model.step(TINY, Plan(pp=2, chunks=3, micro_batches=3), costs(FREE)),
            "with chunks=3, micro_batches must be a multiple of pp=2, got 3",
        ),
        (lambda: model.memory(TINY, Plan(zero=1)), "ZeRO needs several ranks that hold the same"),
        (
            lambda: model.plans(TINY, costs(FREE), 12, 1),
            "gpus must be a multiple of per_host=8, got 12",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message):
    with pytest.raises(ModelError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_a_plan_is_said_in_words():
    plan = Plan(dp=4, zero=3, tp=2, micro_batches=8, recompute="full")
    assert str(plan) == "dp 4, tp 2, ZeRO 3, recompute full, 8 micro-batches of 1"
    assert str(Plan()) == "1 rank, 1 micro-batch of 1"
    assert str(Plan(pp=2, chunks=3)) == "pp 2, 3 chunks, 1 micro-batch of 1"
