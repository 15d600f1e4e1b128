# Made from notebooks/09_ddp_mistakes.ipynb by `make editions`: edit that, not this.
"""DDP: mistakes, found and put right."""

import math
import os
import socket
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

import ddp_kit as kit
from ddp_kit.lessons._ddp_mistakes import main
from ddp_kit.lessons._launch import run_as_script


def sharing(rank, world_size, by_local_rank):
    number = int(os.environ["LOCAL_RANK"]) if by_local_rank else 0
    places = [None] * world_size
    dist.all_gather_object(places, (socket.gethostname(), f"cuda:{number}"))
    return [r for r in range(world_size) if r != rank and places[r] == places[rank]]


def pull(rank, world_size, unwrap, steps=12):
    weight = nn.Linear(1, 1, bias=False).to(kit.device())
    nn.init.zeros_(weight.weight)
    model = nn.parallel.DistributedDataParallel(weight)
    called = model.module if unwrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = torch.ones(1, 1, device=kit.device())
    held = []
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(called(one), 10.0 * rank * one).backward()
        optimizer.step()
        held.append(weight.weight.item())
    return held


def mean_loss(losses):
    count = torch.tensor(losses.numel(), device=losses.device)
    dist.all_reduce(count)
    return losses.sum() * dist.get_world_size() / count


def uneven_gradient(rank, world_size, shards, weighted):
    model = nn.Linear(1, 1, bias=False).to(kit.device())
    nn.init.zeros_(model.weight)
    targets = torch.tensor(shards[rank], device=kit.device()).view(-1, 1)
    wrapper = nn.parallel.DistributedDataParallel(model)
    losses = F.mse_loss(wrapper(torch.ones_like(targets)), targets, reduction="none")
    loss = mean_loss(losses) if weighted else losses.mean()
    loss.backward()
    return model.weight.grad.item()


def clipped(rank, world_size, early, micro_batches=3):
    layer = nn.Linear(2, 1, bias=False).to(kit.device())
    model = nn.parallel.DistributedDataParallel(layer)
    for micro in range(micro_batches):
        x = torch.tensor([[3.0 * rank, micro + 1.0]], device=kit.device())
        last = micro == micro_batches - 1
        with nullcontext() if last else model.no_sync():
            (model(x).mean() / micro_batches).backward()
        if early or last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return layer.weight.grad


def masks(rank, world_size, by_rank):
    torch.manual_seed(100 + rank if by_rank else 100)
    return F.dropout(torch.ones(8), training=True).bool().int().tolist()


def running_means(rank, world_size):
    norm = nn.BatchNorm1d(1, momentum=0.5).to(kit.device())
    model = nn.parallel.DistributedDataParallel(norm)
    means = []
    for _ in range(2):
        x = 8.0 * (rank + 1) + torch.tensor([[-1.0], [1.0]], device=kit.device())
        model(x).sum().backward()
        means.append(norm.running_mean.item())
    return means


def count_right(rank, world_size, padded):
    right = torch.tensor([1] * 5 + [0] * 5, device=kit.device())
    every_nth = range(rank, len(right), world_size)
    mine = list(DistributedSampler(right, shuffle=False) if padded else every_nth)
    total = torch.tensor([right[mine].sum(), len(mine)], device=kit.device())
    dist.all_reduce(total)
    return total.tolist()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(1, 1, bias=False)
        self.heads = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x, head):
        return self.heads[head](self.trunk(x))


def use_heads(rank, world_size, find_unused_parameters, heads, steps=1):
    model = Heads().to(kit.device())
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
    x = torch.full((1, 1), 10.0**rank, device=kit.device())
    for _ in range(steps):
        model.zero_grad()
        ddp(x, heads[rank]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: None if g is None else g.item() for name, g in gradients.items()}


LOSSES = [8.0, 4.0, 3.0, 3.0, 3.0, 3.0], [8.0, 6.0, 5.0, 4.0, 4.5, 5.0]  # of ranks 0 and 1


class StopAlone:
    def __init__(self, patience):
        self.patience, self.best, self.since = patience, math.inf, 0  # epochs since the best

    def __call__(self, loss):
        self.since = 0 if loss < self.best else self.since + 1
        self.best = min(self.best, loss)
        return self.since >= self.patience


def epochs(rank, world_size, make_stop):
    stop = make_stop(2)
    for epoch, loss in enumerate(LOSSES[rank], 1):
        dist.all_reduce(torch.ones(1, device=kit.device()))
        if stop(loss):
            return f"stops after epoch {epoch}"


def skip_bad(rank, world_size, together):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1).to(kit.device()))
    steps = 0
    for step in range(3):
        bad = step == 1 and rank == world_size - 1
        x = torch.full((1, 1), math.nan if bad else 1.0, device=kit.device())
        loss = model(x).sum()
        good = loss.detach().isfinite().int()
        if together:
            dist.all_reduce(good, op=dist.ReduceOp.MIN)
        if good:
            loss.backward()
            steps += 1
    return steps


if __name__ == "__main__":
    run_as_script(main)
