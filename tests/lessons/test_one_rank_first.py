"""What a step costs on one rank: the lesson's formulas beside what PyTorch does."""

from __future__ import annotations

import torch
from torch import nn

from ddp_kit.lessons import one_rank_first as lesson
from ddp_kit.lessons._gpt import batches, loss_of, make_gpt


def test_a_whole_model_keeps_its_layers_and_its_logits():
    tokens = 5 * 64
    # The last norm and the head keep their inputs and a mean and a deviation, the loss the logits.
    head = tokens * (64 + 64 + 2 + 128) * 4
    rest = tokens * 8 + 64 * 8 + 8  # targets, positions, the loss and its weight
    found, _ = lesson.kept_by(make_gpt(), next(batches(5, 1)))
    assert found == 2 * lesson.layer_keeps(tokens, 64, 4) + head + rest


def test_kept_counts_what_is_alive_and_no_memory_twice():
    with lesson.Kept() as kept:
        made = torch.ones(10)
        view = made[2:]
        torch.ones(1000)
    assert kept.nbytes == 40
    del made
    assert kept.nbytes == 40
    del view
    assert kept.nbytes == 0


def test_products_are_kept_and_the_rest_is_computed_again():
    layers = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4, bias=False), nn.GELU())
    with lesson.Kept() as kept:
        out = lesson.selective(layers)(torch.ones(6, 8).requires_grad_())
    product = 6 * 4 * 4
    assert kept.nbytes == out.nbytes + product + 6 * 8 * 4  # and the input, made inside


def test_accumulated_gradients_are_those_of_the_whole_batch():
    whole, parts, batch = make_gpt(), make_gpt(), next(batches(4, 1))
    loss_of(whole, *batch).backward()
    lesson.accumulate(parts, *batch, 4)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
