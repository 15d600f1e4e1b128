"""Wrong answers to the exercises of lesson 19, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
from answers import mistake

from ddp_kit.lessons.experts import combine

pytestmark = pytest.mark.usefixtures("forked_ranks")


@mistake("19.1", "own tokens", "exercise 19.1, violation(choice, count) on 2 ranks: wrong")
def test_a_violation_of_one_rank(choice, count):
    load = torch.zeros(count)
    for expert in choice.flatten().tolist():
        load[expert] += 1
    return (load.max() - load.mean()) / load.mean()


@mistake("19.c", "not put back", "exercise 19.c, combine(done, weights, plan) on 2 ranks: wrong")
def test_results_in_the_order_of_the_experts(done, weights, plan):
    order, *splits = plan
    return combine(done, weights, (torch.arange(len(order)), *splits))
