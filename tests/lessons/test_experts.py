"""Experts on several ranks: what they compute, and whose gradients are averaged with whose."""

from __future__ import annotations

import pytest
import torch

import ddp_kit as kit
from ddp_kit.lessons import experts as lesson

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_the_bias_chooses_and_the_scores_weigh():
    scores = torch.tensor([[0.1, 0.3, 0.6]])
    weights, choice = lesson.route(scores, torch.tensor([1.0, 0.0, 0.0]))
    assert choice.tolist() == [[0, 2]]
    assert weights[0].tolist() == pytest.approx([1 / 7, 6 / 7])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("skew", [0.0, 100.0])
def test_a_layer_is_that_of_one_process_with_few_tokens_and_with_none(world_size, skew):
    count, length = 2 * world_size, 4 * world_size
    alone = lesson.use_alone(world_size, count, length, skew)
    for rank, mine in enumerate(kit.run(lesson.use, count, length, skew, world_size=world_size)):
        kit.compare(mine, lesson.of_rank(alone[rank], mine)).check()
        own = {name.split(".")[1] for name in mine if name.startswith("experts.")}
        assert own == {str(2 * rank), str(2 * rank + 1)}


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


def test_copies_stay_equal_and_experts_do_not():
    """Two replicas: ranks 0 and 2 have the same experts, ranks 0 and 1 others."""
    first, other, copy, _ = kit.run(lesson.train, 2, "bias", 2, 4, 4, world_size=4)
    assert set(first["parameters"]) == set(copy["parameters"]) != set(other["parameters"])
    for name, value in copy["parameters"].items():
        assert torch.equal(first["parameters"][name], value), name
