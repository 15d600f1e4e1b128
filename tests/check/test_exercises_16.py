"""Wrong answers to the exercises of lesson 16, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.hints import solutions
from ddp_kit.check.tensor_parallel import _parallelize
from ddp_kit.lessons._tensor_parallel import LlamaBlock

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
        ("otherwise", lambda x, w, b: x),
    ],
)
def test_a_row_parallel_layer(name, answer):
    fact = "exercise 16.2, row_parallel(x, weight, bias) on 2 ranks: wrong result\n"
    assert_mistake(kit.check.exercise_16_2, answer, name, fact)


@mistake("16.2", "too many bytes", "right, but rank 0 sent 192 bytes where 96 would be")
def test_a_row_parallel_layer_that_reduces_all_positions(x, weight, bias):
    return own(summed(x @ weight.T), 1) + bias


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
        ("otherwise", {"sign": 2}),
    ],
)
def test_a_gradient_of_the_loss(name, wrong):
    start = "exercise 16.4, loss_gradient(logits, targets) on 2 ranks: "
    assert_mistake(kit.check.exercise_16_4, loss_gradient(**wrong), name, start)


@mistake("16.4", "too many bytes", "right, but rank 0 sent 1,920 bytes where 960 would be")
def test_a_gradient_of_gathered_logits(logits, targets):
    x = gathered(logits, 1).requires_grad_()
    torch.nn.functional.cross_entropy(x, targets).backward()
    return own(x.grad, 1)


def test_a_block_that_is_cut_is_the_block_of_one_process():
    torch.manual_seed(0)
    block, x = LlamaBlock().double(), torch.randn(4, 6, 16).double()
    y = block(x)
    (y.square().sum() / 2).backward()  # fully_shard takes the mean over two ranks
    parallelize = defined("16.12", solutions()["16.12"]["program"], "parallelize")
    found = kit.run(_parallelize, parallelize, world_size=4)
    for rank, values in enumerate(found):
        mine = y.chunk(2)[rank // 2].chunk(2, dim=1)[rank % 2].detach()
        kit.compare(values["its positions of the output"], mine).check()
        gradients = {name: values[f"{name}.grad"] for name, _ in block.named_parameters()}
        kit.compare(gradients, {name: p.grad for name, p in block.named_parameters()}).check()
