"""Wrong answers to the exercises of lesson 03, and the errors that the learner gets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import error_text, solved

import ddp_kit as kit


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_mean_that_nobody_waits_for(capsys):
    answer = solved(
        "3.1", {"dist.all_reduce(gradient)": "dist.all_reduce(gradient, async_op=True)"}
    )
    text = error_text(kit.check.exercise_3_1, answer)
    assert "some operations were started but never waited for\nranks 0 and 1 never" in text
    assert "never waited for all_reduce, which may still be in flight; keep what it returns" in text
    assert capsys.readouterr().out == ""  # reported once


def test_one_flat_mean_is_right_and_the_notebook_keeps_its_numbers_and_dtype(capsys):
    def average_weighted(model, digits):
        mine = [gradient.view(-1) * digits for gradient in gradients(model)]
        flat = torch.cat([*mine, torch.tensor([digits])])  # the count travels with them
        dist.all_reduce(flat)
        *pieces, total = flat.split([*(gradient.numel() for gradient in gradients(model)), 1])
        for gradient, piece in zip(gradients(model), pieces, strict=True):
            gradient.copy_(piece.view_as(gradient) / total)

    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        kit.check.exercise_3_1(average_weighted)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out == (
        "Exercise 3.1: right on 1, 2, 3, 4 and 5 ranks, "
        "with at most one all_reduce more than there are gradients.\n"
    )


def test_no_call_on_one_rank_is_right(capsys):
    changes = {"in buckets:": "in buckets if dist.get_world_size() > 1 else []:"}
    kit.check.exercise_3_2(solved("3.2", changes))
    assert capsys.readouterr().out.startswith("Exercise 3.2: right on 1, 2, 3, 4 and 5 ranks")
