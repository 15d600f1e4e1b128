"""The reference for project 2: dp x tp x pp, with 1F1B, under the limit.

A learner's edition does not have this file.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ddp_kit
from ddp_kit.check.too_large_for_one_rank import BATCH, LINK, MODEL
from ddp_kit.lessons._gpt import Block
from ddp_kit.lessons.pipeline_parallel import order
from ddp_kit.lessons.tensor_parallel import cut_block
from ddp_kit.model import Plan, chunked_ring

START = Path(ddp_kit.__file__).parents[1] / "notebooks/projects/2_too_large_for_one_rank.py"
given = runpy.run_path(str(START))
CONFIG, batch, fill = (given[name] for name in ("CONFIG", "batch", "fill"))
make_optimizer = given["make_optimizer"]
PLAN = Plan(dp=2, tp=2, pp=2, micro_batches=BATCH // 2, sequence_parallel=False)
BYTES = MODEL.context * MODEL.width * 8  # of an activation between layers, of one sequence


class Stage(nn.Module):
    """The blocks of a pipeline's stage, cut along tp; embeddings and head are whole."""

    def __init__(self, plan, index, tensor):
        super().__init__()
        many = MODEL.layers // plan.pp
        self.is_first, self.is_last = index == 0, index == plan.pp - 1
        self.blocks = nn.ModuleList()
        for number in range(index * many, (index + 1) * many):
            block = fill(Block(CONFIG), f"blocks.{number}.")
            cut_block(block, group=tensor)
            self.blocks.append(block)
        if self.is_first:
            self.tokens = fill(nn.Embedding(MODEL.vocabulary, MODEL.width), "tokens.")
            self.positions = fill(nn.Embedding(MODEL.context, MODEL.width), "positions.")
        if self.is_last:
            self.norm = fill(nn.LayerNorm(MODEL.width), "norm.")
            self.head = fill(nn.Linear(MODEL.width, MODEL.vocabulary, bias=False), "head.")

    def forward(self, x):
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def step(stage, inputs, targets, plan, index, rank):
    """Run forward and backward of all micro-batches in the order of 1F1B; return the mean loss."""
    m, whole, held, sending = plan.micro_batches, 0.0, {}, []
    parts = list(zip(inputs.chunk(m), targets.chunk(m), strict=True))
    before, after = rank - plan.tp, rank + plan.tp
    for kind, i in order(plan.pp - index, m):
        x, target = parts[i]
        if kind == "F":
            if index:
                x = torch.empty(*x.shape, MODEL.width, dtype=torch.float64)
                dist.recv(x, before, tag=i)
                x.requires_grad_()
            y = stage(x)
            if stage.is_last:
                y = F.cross_entropy(y.flatten(0, 1), target.flatten()) / m
                whole += y.detach()
            else:
                out = y.detach()
                sending.append((dist.isend(out, after, tag=i), out))
            held[i] = x, y
        else:
            x, y = held.pop(i)
            gradient = None
            if not stage.is_last:
                gradient = torch.empty_like(y)
                dist.recv(gradient, after, tag=i)
            y.backward(gradient)
            if index:
                sending.append((dist.isend(x.grad, before, tag=i), x.grad))
            while len(sending) > 1:
                sending.pop(0)[0].wait()
    for work, _ in sending:
        work.wait()
    return whole


def train_with(plan, rank, world_size, steps):
    sizes, names = (plan.dp, plan.pp, plan.tp), ("dp", "pp", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    data, index = mesh.get_group("dp"), mesh.get_local_rank("pp")
    stage, losses = Stage(plan, index, mesh.get_group("tp")), []
    optimizer = make_optimizer(stage.parameters())
    for number in range(steps):
        mine = (part.chunk(plan.dp)[mesh.get_local_rank("dp")] for part in batch(number))
        optimizer.zero_grad()
        loss = step(stage, *mine, plan, index, rank)
        if plan.dp > 1:
            for parameter in stage.parameters():
                dist.all_reduce(parameter.grad, group=data)
                parameter.grad /= plan.dp
        if stage.is_last:
            if plan.dp > 1:
                dist.all_reduce(loss, group=data)
            losses.append(loss.item() / plan.dp)
        optimizer.step()
    return losses


def train(rank, world_size, steps):
    return train_with(PLAN, rank, world_size, steps)


def parameters(stage, plan=PLAN):
    """Return the numbers in a rank's parameters."""
    cut = MODEL.layers // plan.pp * MODEL.layer_weights / plan.tp
    whole = MODEL.layers // plan.pp * MODEL.layer_vectors
    first = (stage == 0) * MODEL.embeddings
    last = (stage == plan.pp - 1) * (MODEL.head + 2 * MODEL.width)
    return cut + whole + first + last


def sent(rank, plan=PLAN):
    """Return how many bytes a rank sends in one step."""
    stage = rank // plan.tp % plan.pp
    neighbours = (stage > 0) + (stage < plan.pp - 1)
    reduces = 4 * MODEL.layers // plan.pp * plan.micro_batches
    tp = reduces * 2 * (plan.tp - 1) / plan.tp * BYTES
    pp = neighbours * plan.micro_batches * BYTES
    dp = 2 * (plan.dp - 1) / plan.dp * 8 * parameters(stage, plan)
    return tp + pp + dp


def seconds(plan=PLAN):
    """Return how long a step takes on LINK: the micro-batches, the bubble, and the gradients."""
    reduces = 4 * MODEL.layers // plan.pp
    each = reduces * chunked_ring(plan.tp, BYTES, LINK.alpha, LINK.beta)
    each += min(2, plan.pp - 1) * (LINK.alpha + LINK.beta * BYTES)
    tensors = 2 + MODEL.layers // plan.pp * 10  # embeddings, and those of the blocks
    average = parameters(0, plan) * 8 / tensors
    gradients = tensors * chunked_ring(plan.dp, average, LINK.alpha, LINK.beta)
    return (plan.micro_batches + plan.pp - 1) * each + gradients
