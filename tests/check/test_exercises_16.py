"""Wrong answers to the exercises of lesson 16, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import mistake

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


@mistake("16.2", "otherwise", "row_parallel(x, weight, bias) on 2 ranks: wrong result\n")
def test_a_row_parallel_layer_that_does_nothing(x, weight, bias):
    return x


@mistake("16.2", "too many bytes", "right, but rank 0 sent 192 bytes where 96 would be")
def test_a_row_parallel_layer_that_reduces_all_positions(x, weight, bias):
    return own(summed(x @ weight.T), 1) + bias


@mistake(
    "16.4", "target as index", "loss_gradient(logits, targets) on 2 ranks: it raised an error\n"
)
def test_a_target_that_is_taken_for_an_own_token(logits, targets):
    return torch.zeros_like(logits).scatter(1, targets.unsqueeze(1), 1.0)


@mistake("16.4", "otherwise", "loss_gradient(logits, targets) on 2 ranks: wrong result\n")
def test_a_gradient_that_is_zero(logits, targets):
    return torch.zeros_like(logits)


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
