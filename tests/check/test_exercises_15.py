"""Answers to the exercises of lesson 15 that are no change of the solution."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def stepping(send, times=lambda step: 1):
    """Return an answer to 15.1. send: of a parameter, its owner and the rank."""

    def make_step(owners, optimizer_cls):
        rank, taken = dist.get_rank(), []
        optimizer = optimizer_cls([p for p, owner in owners.items() if owner == rank])

        def step():
            taken.append(1)
            for parameter in owners:
                parameter.grad *= times(len(taken))
            optimizer.step()
            for parameter, owner in owners.items():
                send(parameter.data, owner, rank)

        return step

    return make_step


def test_a_step_in_which_one_rank_sends_deadlocks():
    answer = stepping(lambda data, owner, rank: rank or dist.broadcast(data, owner))
    assert_mistake(kit.check.exercise_15_1, answer, "fails", "it deadlocks")


def test_a_step_that_does_not_wait():
    answer = stepping(lambda data, owner, rank: dist.broadcast(data, owner, async_op=True))
    fact = "some operations were started but never waited for"
    assert_mistake(kit.check.exercise_15_1, answer, "", fact)


def test_a_second_step_with_other_gradients():
    answer = stepping(lambda data, owner, rank: dist.broadcast(data, owner), lambda step: step)
    fact = "in parameter 0 after step 2 but holds"
    assert_mistake(kit.check.exercise_15_1, answer, "otherwise", fact)


def test_rows_are_right_if_pytorch_takes_the_mean(capsys):
    def own_rows(gradients):
        n, rank = dist.get_world_size(), dist.get_rank()
        parts = [torch.cat([g.chunk(n)[r].flatten() for g in gradients]) for r in range(n)]
        mine = torch.empty_like(parts[rank])
        dist.reduce_scatter(mine, parts, op=dist.ReduceOp.AVG)
        shapes = [gradient.chunk(n)[rank].shape for gradient in gradients]
        pieces = mine.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    kit.check.exercise_15_2(own_rows)
    assert capsys.readouterr().out.startswith("Exercise 15.2: right on 2 and 3 ranks")


@mistake("15.3", "otherwise", "in whole weights in memory after the backward but")
def test_a_layer_that_keeps_the_weight_of_the_backward(x, rows, gather, average):
    y, weights = x @ gather(rows).T, []

    def backward(grad_y):
        weights.append(gather(rows))
        return grad_y @ weights[0], average(grad_y.T @ x)

    return y, backward


@mistake("15.4", "otherwise", "in the bytes held in stage 1 on 8 ranks in mixed precision")
def test_bytes_that_are_of_float32_only(stage, parameters, n, kinds):
    held = parameters * (sum((8, 4, 4)[:stage]) / n + sum((8, 4, 4)[stage:]))
    return held, 0.0
