"""Experts on several ranks: what they compute, and whose gradients are averaged with whose."""

from __future__ import annotations

import pytest
import torch

from ddp_kit.lessons import experts as lesson

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_the_bias_chooses_and_the_scores_weigh():
    scores = torch.tensor([[0.1, 0.3, 0.6]])
    weights, choice = lesson.route(scores, torch.tensor([1.0, 0.0, 0.0]))
    assert choice.tolist() == [[0, 2]]
    assert weights[0].tolist() == pytest.approx([1 / 7, 6 / 7])


def test_the_auxiliary_loss_is_1_if_all_is_even_and_grows_with_the_load_of_the_best():
    scores = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.8, 0.8, 0.8, 0.8]])
    assert lesson.balance_loss(scores, torch.ones(4)).item() == pytest.approx(1)
    scores[:, 0] *= 2
    even, uneven = (
        lesson.balance_loss(scores, torch.tensor(f)) for f in ([1.0] * 4, [2.0, 1, 1, 0])
    )
    assert even.item() == pytest.approx(1)
    assert uneven.item() == pytest.approx(4 * (0.5 * 0.4 + 0.5 * 0.2))


def test_a_capacity_keeps_the_first_slots_of_each_expert():
    choice = torch.tensor([[0, 1], [0, 2], [0, 1]])
    kept = [[True, True], [True, True], [False, True]]
    assert lesson.keep(choice, 4, 2).tolist() == kept
