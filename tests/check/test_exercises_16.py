"""Wrong answers to the exercises of lesson 16, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
from answers import solved

import ddp_kit as kit
from ddp_kit.check.tensor_parallel import _parallelize
from ddp_kit.lessons._tensor_parallel import LlamaBlock

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_a_block_that_is_cut_is_the_block_of_one_process():
    torch.manual_seed(0)
    block, x = LlamaBlock().double(), torch.randn(4, 6, 16).double()
    y = block(x)
    (y.square().sum() / 2).backward()  # fully_shard takes the mean over two ranks
    found = kit.run(_parallelize, solved("16.12"), world_size=4)
    for rank, values in enumerate(found):
        mine = y.chunk(2)[rank // 2].chunk(2, dim=1)[rank % 2].detach()
        kit.compare(values["its positions of the output"], mine).check()
        gradients = {name: values[f"{name}.grad"] for name, _ in block.named_parameters()}
        kit.compare(gradients, {name: p.grad for name, p in block.named_parameters()}).check()
