"""Wrong answers to the exercises of lesson 16, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def own(tensor, dim=0):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def summed(tensor, op=dist.ReduceOp.SUM):
    total = tensor.contiguous().clone()
    dist.all_reduce(total, op)
    return total


def gathered(tensor, dim):
    parts = [torch.empty_like(tensor.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


@mistake("16.1", "neighbouring rows", "exercise 16.1, own_heads(weight) on 2 ranks: wrong result\n")
def test_rows_of_the_whole_weight(weight):
    return own(weight)


@mistake("16.1", "columns")
def test_columns_of_the_whole_weight(weight):
    return own(weight, 1)


@mistake("16.1", "columns")
def test_columns_of_each_layer(weight):
    return torch.cat([own(layer, 1) for layer in weight.chunk(3)])


@mistake("16.1", "whole weight")
def test_all_heads(weight):
    return weight


@mistake("16.1", "one layer")
def test_heads_of_the_key(weight):
    return own(weight.chunk(3)[1])


@mistake("16.1", "other rows")
def test_heads_of_the_value_first(weight):
    return torch.cat([own(layer) for layer in reversed(weight.chunk(3))])


@mistake("16.1", "something sent", "right, but", "were sent by rank 0 where 0 would be enough\n")
def test_heads_of_a_weight_that_is_sent(weight):
    dist.broadcast(weight, src=0)
    return torch.cat([own(layer) for layer in weight.chunk(3)])


def scattered(summand, dim=1):
    parts = [part.contiguous() for part in summand.chunk(dist.get_world_size(), dim)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("bias on each rank", lambda x, w, b: scattered(x @ w.T + b)),
        ("no bias", lambda x, w, b: scattered(x @ w.T)),
        ("all positions", lambda x, w, b: summed(x @ w.T) + b),
        ("all positions and biases", lambda x, w, b: summed(x @ w.T + b)),
        ("not summed", lambda x, w, b: own(x @ w.T + b, 1)),
        ("own summand", lambda x, w, b: x @ w.T + b),
        ("sequences", lambda x, w, b: scattered(x @ w.T, 0) + b),
        ("other value", lambda x, w, b: x),
    ],
)
def test_a_row_parallel_layer(name, answer):
    fact = "exercise 16.2, row_parallel(x, weight, bias) on 2 ranks: wrong result\n"
    assert_mistake(kit.check.exercise_16_2, answer, name, fact)


@mistake("16.2", "too many bytes", "right, but 192 bytes were sent by rank 0 where 96 would be")
def test_a_row_parallel_layer_that_reduces_all_positions(x, weight, bias):
    return own(summed(x @ weight.T), 1) + bias


def in_its_place(gradient):
    """Return the gradient of all positions, with zeros for those of other ranks."""
    length, rank = gradient.shape[1], dist.get_rank()
    padded = gradient.new_zeros(2, dist.get_world_size() * length, 2)
    padded[:, rank * length : (rank + 1) * length] = gradient
    return padded


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("own positions", lambda ctx, gradient: gradient),
        ("zeros", lambda ctx, gradient: in_its_place(gradient)),
        ("summed", lambda ctx, gradient: summed(gradient)),
        ("sequences", lambda ctx, gradient: gathered(gradient, 0)),
        ("joined and summed", lambda ctx, gradient: summed(gathered(gradient, 1))),
        ("other value", lambda ctx, gradient: gradient.sum()),
    ],
)
def test_a_backward(name, answer):
    fact = "exercise 16.3, backward(ctx, gradient) on 2 ranks: wrong result\n"
    assert_mistake(kit.check.exercise_16_3, answer, name, fact)


@mistake("16.3", "too many bytes", "right, but 64 bytes were sent by rank 0 where 32 would be")
def test_a_backward_that_sums_zeros(ctx, gradient):
    return summed(in_its_place(gradient))


@mistake("16.3", "gradient changed", "rank 0 should hold [1, 2, 3, 4, 5, 6, 7, 8] in gradient but")
def test_a_backward_that_changes_its_gradient(ctx, gradient):
    whole = gathered(gradient, 1)
    dist.all_reduce(gradient)
    return whole


def loss_gradient(largest="all", total="all", target="own", mean=True, sign=1):
    """Return an answer to 16.4; each argument can make it wrong in one way."""

    def answer(logits, targets):
        width = logits.shape[1]
        largest_logit = logits.amax(1, keepdim=True)
        if largest == "all":
            largest_logit = summed(largest_logit, dist.ReduceOp.MAX)
        if largest == "none":
            largest_logit = 0
        exponentials = (logits - largest_logit).exp()
        sums = exponentials.sum(1, keepdim=True)
        sums = summed(sums) if total == "all" else sums
        own_tokens = dist.get_rank() * width + torch.arange(width)
        hot = (own_tokens == targets.unsqueeze(1)).double()
        if target == "every rank":
            hot = (torch.arange(width) == targets.unsqueeze(1) % width).double()
        if target == "index":
            hot = torch.zeros_like(logits).scatter(1, targets.unsqueeze(1), 1.0)
        if target == "none":
            hot = 0
        return sign * (exponentials / sums - hot) / (len(targets) if mean else 1)

    return answer


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("own sum", {"total": "own"}),
        ("own maximum", {"largest": "own"}),
        ("no maximum", {"largest": "none"}),
        ("target on every rank", {"target": "every rank"}),
        ("target as index", {"target": "index"}),
        ("no target", {"target": "none"}),
        ("not divided", {"mean": False}),
        ("wrong sign", {"sign": -1}),
        ("other value", {"sign": 2}),
    ],
)
def test_a_gradient_of_the_loss(name, wrong):
    start = "exercise 16.4, loss_gradient(logits, targets) on 2 ranks: "
    assert_mistake(kit.check.exercise_16_4, loss_gradient(**wrong), name, start)


@mistake("16.4", "too many bytes", "right, but 1,920 bytes were sent by rank 0 where 960 would be")
def test_a_gradient_of_gathered_logits(logits, targets):
    x = gathered(logits, 1).requires_grad_()
    torch.nn.functional.cross_entropy(x, targets).backward()
    return own(x.grad, 1)
