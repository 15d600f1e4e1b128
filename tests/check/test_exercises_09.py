"""Right answers to the tasks of lesson 09 that are not the stored ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_a_loss_may_be_weighted_by_the_share_of_the_examples(capsys):
    def mean_loss(losses):
        lengths = torch.zeros(dist.get_world_size())
        lengths[dist.get_rank()] = len(losses)
        dist.all_reduce(lengths)
        return losses.mean() * len(losses) / lengths.mean()

    kit.check.exercise_9_a(mean_loss)
    assert capsys.readouterr().out == "Exercise 9.a: right on 2 and 3 ranks.\n"


def test_a_share_may_be_a_sum_of_weighted_shares(capsys):
    def share_right(right):
        right_of_all, of_all = torch.tensor(sum(right.tolist())), torch.tensor(len(right))
        dist.all_reduce(right_of_all)
        dist.all_reduce(of_all)
        return int(right_of_all) / int(of_all)

    kit.check.exercise_9_b(share_right)
    assert capsys.readouterr().out == "Exercise 9.b: right on 2 and 3 ranks.\n"


def test_a_stop_may_sum_losses_and_keep_its_own_count(capsys):
    class StopTogether:
        def __init__(self, patience):
            self.patience, self.best, self.since = patience, math.inf, 0

        def __call__(self, loss):
            total = torch.tensor([loss])
            dist.all_reduce(total)
            if total.item() < self.best:
                self.best, self.since = total.item(), 0
            else:
                self.since += 1
            return self.since >= self.patience

    kit.check.exercise_9_c(StopTogether)
    assert capsys.readouterr().out == "Exercise 9.c: right on 2 and 3 ranks.\n"
