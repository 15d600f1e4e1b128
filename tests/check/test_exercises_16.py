"""Wrong answers to the exercises of lesson 16, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text

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


def own_heads(weight):
    return torch.cat([own(layer) for layer in weight.chunk(3)])


def sent_for_nothing(weight):
    dist.broadcast(weight, src=0)
    return own_heads(weight)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (own, "Those are neighbouring rows of all three: rank 0 has the query"),
        (lambda weight: own(weight, 1), "Those are columns of `weight`: features of the input."),
        (
            lambda weight: torch.cat([own(layer, 1) for layer in weight.chunk(3)]),
            "Those are columns of `weight`",
        ),
        (lambda weight: weight, "That is the whole weight on every rank."),
        (lambda weight: own(weight.chunk(3)[1]), "That is one of the three layers only"),
        (
            lambda weight: torch.cat([own(layer) for layer in reversed(weight.chunk(3))]),
            "The rows are the query's, then the key's, then the value's.",
        ),
        (sent_for_nothing, "were sent by rank 0 where 0 would be enough\nEvery rank has the whole"),
    ],
)
def test_heads_that_are(answer, words):
    text = error_text(kit.check.exercise_16_1, answer)
    assert text.startswith("exercise 16.1, own_heads(weight) on 2 ranks: ")
    assert words in text


def scattered(summand, dim=1):
    parts = [part.contiguous() for part in summand.chunk(dist.get_world_size(), dim)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x, w, b: scattered(x @ w.T + b), "The bias is in it once for each rank"),
        (lambda x, w, b: scattered(x @ w.T), "The bias is missing: add it to the sum."),
        (lambda x, w, b: summed(x @ w.T) + b, "Those are all positions: each rank should"),
        (lambda x, w, b: summed(x @ w.T + b), "Those are all positions, and the bias is in it n"),
        (lambda x, w, b: own(x @ w.T + b, 1), "That is this rank's summand: add up over the"),
        (lambda x, w, b: x @ w.T + b, "That is this rank's summand, for all positions."),
        (lambda x, w, b: scattered(x @ w.T, 0) + b, "Those are sequences of the batch."),
        (lambda x, w, b: x, "x @ weight.T is a summand of the output. Cut it"),
        (
            lambda x, w, b: own(summed(x @ w.T), 1) + b,
            "right, but 192 bytes were sent by rank 0 where 96 would be enough\nEvery rank needs",
        ),
    ],
)
def test_a_row_parallel_layer_that_is(answer, words):
    text = error_text(kit.check.exercise_16_2, lambda x, weight, bias: answer(x, weight, bias))
    assert text.startswith("exercise 16.2, row_parallel(x, weight, bias) on 2 ranks: ")
    assert words in text


def in_its_place(gradient):
    """Return the gradient of all positions, with zeros for those of other ranks."""
    length, rank = gradient.shape[1], dist.get_rank()
    padded = gradient.new_zeros(2, dist.get_world_size() * length, 2)
    padded[:, rank * length : (rank + 1) * length] = gradient
    return padded


def gathered_after_a_change(gradient):
    whole = gathered(gradient, 1)
    dist.all_reduce(gradient)
    return whole


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda gradient: gradient, "That is the gradient of this rank's positions: gather"),
        (in_its_place, "The positions of the others have zeros, which is what autograd does"),
        (summed, "Those are different positions: they are joined, and not added up."),
        (lambda gradient: gathered(gradient, 0), "Those are joined along the batch."),
        (
            lambda gradient: dist.get_world_size() * gathered(gradient, 1),
            "Every number is there n times: do not add them up.",
        ),
        (lambda gradient: gradient.sum(), "The forward keeps this rank's positions of an input"),
        (
            lambda gradient: summed(in_its_place(gradient)),
            "right, but 64 bytes were sent by rank 0 where 32 would be enough\nEach number",
        ),
        (gathered_after_a_change, "Leave the gradient as it is: autograd may use it elsewhere"),
    ],
)
def test_a_backward_that_is(answer, words):
    text = error_text(kit.check.exercise_16_3, lambda ctx, gradient: answer(gradient))
    assert text.startswith("exercise 16.3, backward(ctx, gradient) on 2 ranks: ")
    assert words in text


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
    ("wrong", "words"),
    [
        ({"total": "own"}, "The probabilities add up to one on each rank"),
        ({"largest": "own"}, "Each rank has subtracted a maximum of its own."),
        ({"largest": "none"}, "The exponential of 1000 is infinite."),
        ({"target": "every rank"}, "Every rank has subtracted 1, but a target is in the part of"),
        ({"target": "index"}, "A target may be in another rank's part of the vocabulary."),
        ({"target": "none"}, "Those are the probabilities: subtract 1 at the target"),
        ({"mean": False}, "The loss is the mean over the positions: divide by their number."),
        ({"sign": -1}, "The sign is wrong."),
        ({"sign": 2}, "The gradient is the softmax, over all ranks, minus 1 at the target"),
    ],
)
def test_a_gradient_of_the_loss_that_is(wrong, words):
    text = error_text(kit.check.exercise_16_4, loss_gradient(**wrong))
    assert text.startswith("exercise 16.4, loss_gradient(logits, targets) on 2 ranks: ")
    assert words in text


def test_a_gradient_of_gathered_logits():
    def answer(logits, targets):
        x = gathered(logits, 1).requires_grad_()
        torch.nn.functional.cross_entropy(x, targets).backward()
        return own(x.grad, 1)

    text = error_text(kit.check.exercise_16_4, answer)
    assert "right, but 1,920 bytes were sent by rank 0 where 960 would be enough\nTwo" in text
