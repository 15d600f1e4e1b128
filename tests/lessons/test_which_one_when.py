"""Two dimensions on real ranks, what they hold, and the formulas beside published trainings."""

from __future__ import annotations

import pytest
import torch

import ddp_kit as kit
from ddp_kit import model
from ddp_kit.lessons import which_one_when as lesson

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_ranks_hold_what_the_formula_says_and_a_rest_that_is_known_in_float32():
    variants = [(again, dtype) for dtype in (None, torch.bfloat16) for again in (False, True)]

    def all_variants(rank, world_size):
        return [lesson.hold(rank, world_size, 2, *variant) for variant in variants]

    result = kit.run(all_variants, world_size=4)
    gpt = lesson.SMALL
    plan = {"dp": 2, "zero": 3, "tp": 2, "micro_batch": 6, "sequence_parallel": False}
    tokens, logits = 6 * 64, 6 * 64 * 128 * 4  # what the loss keeps; our vocabulary is not cut
    indices = 8 * (12 * 65 + tokens + 64) + 4  # tokens, targets, places; one number
    for (recompute, dtype), (moments, _) in zip(variants, result[0], strict=True):
        precision = model.FP32 if dtype is None else model.Precision(4, 4, 8, 2)
        sharing = model.Plan(**plan, recompute="full" if recompute else "none")
        formula = model.memory(gpt, sharing, precision)["activations"]
        measured = moments["after forward"]["activations"] - logits
        norms = 1 if recompute else 5  # a mean and a variance of each token
        statistics = norms * tokens * 2 * 4 + (not recompute) * 2 * tokens * 2 * 4
        if dtype is None:
            assert measured == formula + statistics + indices
        else:
            assert formula < measured <= formula + statistics + indices
    for rank in range(4):
        moments, parameters = result[rank][0]
        states = moments["after backward"]
        kept = 2 * (2 * 12 * 64**2 // 2 + 2 * 4 * 64) + 2 * (128 * 64 + 64 * 64 + 2 * 64)
        assert states["parameters"] == states["gradients"] == kept
        assert states["optimizer"] == 2 * kept
        assert states["gathered parameters"] == states["activations"] == 0
        assert moments["after forward"]["gathered parameters"] == 4 * (12 * 1024 + 128)
        kit.compare(result[rank][1][1], parameters, rtol=0, atol=0).check()  # recomputed
        kit.compare(result[rank][3][1], result[rank][2][1], rtol=0, atol=0).check()
    assert not kit.compare(result[0][2][1], result[0][0][1])  # bfloat16 is another training


def test_recomputation_repeats_one_all_reduce_of_each_block_and_sends_no_more_along_dp():
    (once, calls), (again, more) = lesson.step_of(), lesson.step_of(recompute=True)
    expected = {name: round(nbytes) for name, nbytes in lesson.bytes_along(2, 2).items()}
    assert {name: sum(sent.values()) for name, sent in once.items()} == expected
    assert (calls, more) == (8, 10)
    assert sum(again["tp"].values()) == expected["tp"] * 5 // 4
    assert again["dp"] == once["dp"]


# ---- published training runs


@pytest.mark.parametrize("row", lesson.MEGATRON, ids=lambda row: str(row.billions))
def test_a_row_of_megatron_has_the_published_sizes(row):
    transformer, plan = lesson.megatron(row)
    assert round(transformer.parameters / 1e9, 1) == row.billions
    assert (plan.ranks, plan.batch) == (row.gpus, row.batch)


@pytest.mark.parametrize("row", lesson.LLAMA_3)
def test_a_row_of_llama_3_has_the_published_sizes(row):
    transformer, plan = lesson.llama(row)
    assert round(transformer.parameters / 1e9) == 406
    assert plan.ranks == row.gpus
    assert plan.batch * row.context == 2**24  # "16M" tokens


def test_eight_chunks_explain_16384_accelerators_and_one_does_not():
    def predictions(chunks):
        def predict(row, cluster):
            return lesson.tflops(*lesson.llama(row, chunks), cluster, lesson.FLOAT32_GRADIENTS)

        first = lesson.LLAMA_3[0]
        fitted = lesson.fit_efficiency(
            model.DGX_H100, lambda cluster: predict(first, cluster), first.tflops
        )
        cluster = lesson.with_efficiency(model.DGX_H100, fitted)
        return fitted, predict(lesson.LLAMA_3[1], cluster) / lesson.LLAMA_3[1].tflops - 1

    assert predictions(1)[1] < -0.15
    fitted, error = predictions(8)
    assert abs(error) < 0.02
    assert model.DGX_H100.accelerator.efficiency == round(fitted, 2)


@pytest.mark.parametrize("run", lesson.HELD_OUT, ids=lambda run: f"{run.name} on {run.plan.ranks}")
def test_a_run_to_which_nothing_was_fitted_is_predicted_as_well_as_the_notebook_says(run):
    found = model.estimate(run.model, run.plan, run.cluster, run.precision)
    if run.seconds:
        off = found.seconds / run.seconds - 1
        assert abs(off) < (0.21 if run.name == "1T" else 0.165)
    if run.memory:
        assert -0.225 < found.nbytes / 2**30 / run.memory - 1 < 0.01
