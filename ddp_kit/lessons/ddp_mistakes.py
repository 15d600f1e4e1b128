# Made from notebooks/09_ddp_mistakes.ipynb by `make editions`: edit that, not this. cf3f8a485e86
"""DDP: mistakes found in notes and in code."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

import ddp_kit as kit
from ddp_kit.lessons._ddp_mistakes import SYNC_BUFFERS, main
from ddp_kit.lessons._launch import run_as_script


def pull(rank, world_size, lr=0.1, hook=None, unwrap=False, steps=12):
    weight = nn.Linear(1, 1, bias=False).to(kit.device())
    nn.init.zeros_(weight.weight)
    model = nn.parallel.DistributedDataParallel(weight)
    if hook is not None:
        model.register_comm_hook(None, hook)
    if unwrap:
        model = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    one = torch.ones(1, 1, device=kit.device())
    target = torch.tensor([[10.0 * rank]], device=kit.device())
    held = []
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(one), target).backward()
        optimizer.step()
        held.append(weight.weight.item())
    return held


def sum_gradients(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


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


def gradient(rank, world_size, keep):
    model = nn.Linear(1, 1, bias=False).to(kit.device())
    x = torch.full((1, 1), 2.0 * rank, device=kit.device())
    if keep:
        wrapper = nn.parallel.DistributedDataParallel(model)
        loss = wrapper(x).sum()
    else:
        loss = nn.parallel.DistributedDataParallel(model)(x).sum()
    loss.backward()
    return model.weight.grad.item()


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
    names = {"trunk": model.trunk, "head 0": model.heads[0], "head 1": model.heads[1]}
    gradients = {name: layer.weight.grad for name, layer in names.items()}
    return {name: None if g is None else g.item() for name, g in gradients.items()}


def running_means(rank, world_size, sync=True):
    norm = nn.BatchNorm1d(1, momentum=0.5).to(kit.device())
    seen = []
    norm.register_forward_pre_hook(lambda *_: seen.append(norm.running_mean.clone()))
    norm.register_forward_hook(lambda *_: seen.append(norm.running_mean.clone()))
    model = nn.parallel.DistributedDataParallel(norm, **{SYNC_BUFFERS: sync})
    for _ in range(2):
        x = 8.0 * (rank + 1) + torch.tensor([[-1.0], [1.0]], device=kit.device())
        model(x).sum().backward()
    return {
        "after forward 1": seen[1],
        "at the start of forward 2": seen[2],
        "after forward 2": seen[3],
    }


def firsts(rank, world_size, call_set_epoch):
    sampler = DistributedSampler(range(100))
    orders = []
    for epoch in range(3):
        if call_set_epoch:
            sampler.set_epoch(epoch)
        orders.append(list(sampler)[:5])
    return orders


def count_right(rank, world_size, padded):
    right = torch.tensor([1] * 5 + [0] * 5, device=kit.device())
    every_nth = range(rank, len(right), world_size)
    mine = list(DistributedSampler(right, shuffle=False) if padded else every_nth)
    total = torch.tensor([right[mine].sum(), len(mine)], device=kit.device())
    dist.all_reduce(total)
    return total.tolist()


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


if __name__ == "__main__":
    run_as_script(main)
