"""Answers that are compared with the solution, and what their errors say."""

from __future__ import annotations

import pytest
import torch
from answers import assert_mistake, check_of

import ddp_kit as kit


def test_a_result_that_no_known_mistake_has_gets_a_question():
    assert_mistake(kit.check.exercise_4_d, lambda n, alpha, beta: -1.0, "unknown")


@pytest.mark.usefixtures("forked_ranks")
def test_an_answer_that_sends_nothing_is_refused():
    scores = torch.tensor([0.0, 3.0, 1.0, 2.0, 5.0, 4.0])
    values = torch.tensor([5.0, 1.0, 4.0, 2.0, 0.0, 3.0])

    def train(rank, world_size):
        return scores.softmax(0) @ values

    fact = "right, but no rank sent anything to another"
    assert_mistake(check_of("18.8"), train, "nothing sent", fact)
