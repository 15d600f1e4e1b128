# Made from notebooks/19_experts.ipynb by `make editions`: edit that, not this.
"""Experts: every token goes to some of the ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ddp_kit as kit
from ddp_kit.lessons._experts import (
    WIDTH,
    dispatches,
    main,
    make_gpt_with_experts,
    make_moe,
    of_rank,
    some_tokens,
    train_alone,
    use_alone,
)
from ddp_kit.lessons._gpt import Block, batches, loss_of, part_of
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons.context_parallel import AllToAll
from ddp_kit.lessons.zero import ADAM, copies


def mlp(width):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def route(scores, bias, k=2):
    choice = (scores + bias).topk(k, -1).indices
    weights = scores.gather(-1, choice)
    return weights / weights.sum(-1, keepdim=True), choice


class MoE(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        nn.init.normal_(self.router.weight, std=0.02)
        self.register_buffer("bias", torch.zeros(count))
        self.shared = mlp(width)
        self.experts = nn.ModuleDict({str(i): mlp(width) for i in range(count)})

    def forward(self, tokens):
        self.scores = self.router(tokens).sigmoid()
        weights, self.choice = route(self.scores, self.bias)
        return self.shared(tokens) + self.routed(tokens, weights, self.choice)

    def routed(self, tokens, weights, choice):
        output = torch.zeros_like(tokens)
        for i, expert in self.experts.items():
            at, slot = (choice == int(i)).nonzero(as_tuple=True)
            output = output.index_add(0, at, weights[at, slot, None] * expert(tokens[at]))
        return output


def dispatch(tokens, choice, count, group=None):
    order = choice.flatten().argsort(stable=True)  # the slots by expert
    going = torch.bincount(choice.flatten(), minlength=count)
    going = going.view(dist.get_world_size(group), -1)
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going, group=group)
    splits = torch.stack([going.sum(1), coming.sum(1)]).tolist()  # the host waits here
    arrived = AllToAll.apply(tokens[order // choice.shape[1]], *splits, group)
    return arrived, coming, (order, *splits)


def combine(done, weights, plan, group=None):
    order, going, coming = plan
    back = AllToAll.apply(done, coming, going, group)
    slots = back[order.argsort()].view(*weights.shape, -1)
    return (weights[..., None] * slots).sum(1)


def apply_own(experts, rows, counts):
    owner = torch.arange(len(experts), device=rows.device).repeat(len(counts))
    order = owner.repeat_interleave(counts.flatten()).argsort(stable=True)
    parts = zip(experts, rows[order].split(counts.sum(0).tolist()), strict=True)
    done = torch.cat([expert(part) for expert, part in parts])
    return done[order.argsort()]


class ExpertParallel(MoE):
    def __init__(self, moe, group=None):
        nn.Module.__init__(self)  # not MoE's, which would make all experts
        self.router, self.shared, self.group = moe.router, moe.shared, group
        self.register_buffer("bias", moe.bias)
        self.count, n = len(moe.experts), dist.get_world_size(group)
        own = [i for i in moe.experts if int(i) * n // self.count == dist.get_rank(group)]
        self.experts = nn.ModuleDict({i: moe.experts[i] for i in own})

    def routed(self, tokens, weights, choice):
        arrived, counts, plan = dispatch(tokens, choice, self.count, self.group)
        done = apply_own(self.experts.values(), arrived, counts)
        return combine(done, weights, plan, self.group)


def pass_layer(rank, world_size, count=8, length=256, skew=0.0):
    moe = ExpertParallel(make_moe(count, skew))
    tokens, gradient = (x.chunk(world_size)[rank] for x in some_tokens(length))
    output = moe(tokens.requires_grad_())
    output.backward(gradient)
    return moe, {"output": output.detach(), "tokens": tokens.grad}


def use(rank, world_size, count=8, length=256, skew=0.0):
    moe, found = pass_layer(rank, world_size, count, length, skew)
    for parameter in (*moe.router.parameters(), *moe.shared.parameters()):
        dist.all_reduce(parameter.grad)
    return found | {name: parameter.grad for name, parameter in moe.named_parameters()}


def average_gradients(model, mesh):
    for name, parameter in model.named_parameters():
        group = mesh.get_group("replica") if ".experts." in name else None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size()


class MoEBlock(Block):
    def __init__(self, config, moe):
        super().__init__(config)
        del self.up, self.down
        self.mlp = moe

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x).flatten(0, 1)).view_as(x)


WEIGHT = 0.02  # of the auxiliary loss


RATE = 0.03  # of the bias, in each step


def balance_loss(scores, load):
    shares = scores / scores.sum(-1, keepdim=True)
    return len(load) * (load / load.sum() * shares.mean(0)).sum()


def step(model, optimizer, batch, mesh, balance=None, average=average_gradients):
    optimizer.zero_grad()
    loss, moe = loss_of(model, *batch), model.blocks[0].mlp
    load = torch.bincount(moe.choice.flatten(), minlength=moe.count).float()
    dist.all_reduce(load)
    extra = WEIGHT * balance_loss(moe.scores, load) if balance == "loss" else 0
    (loss + extra).backward()
    average(model, mesh)
    optimizer.step()
    if balance == "bias":
        moe.bias += RATE * (load.mean() - load).sign()
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    return mean.item(), load


def train(
    rank, world_size, replicas=1, balance=None, steps=3, count=8, size=8, average=average_gradients
):
    shape = replicas, world_size // replicas
    mesh = init_device_mesh(kit.device().type, shape, mesh_dim_names=("replica", "expert"))
    model = make_gpt_with_experts(count)
    block = model.blocks[0]
    block.mlp = ExpertParallel(block.mlp, mesh.get_group("expert"))
    optimizer, losses, loads = ADAM(model.parameters()), [], []
    for batch in batches(size, steps):
        own = part_of(batch, rank, world_size)
        loss, load = step(model, optimizer, own, mesh, balance, average)
        losses.append(loss)
        loads.append(load)
    load = torch.stack(loads[-10:]).mean(0)
    gradients = {name: parameter.grad for name, parameter in block.mlp.experts.named_parameters()}
    return {
        "losses": losses,
        "parameters": copies(model),
        "gradients": gradients,
        "load": load.tolist(),
    }


def keep(choice, count, capacity):
    taken = nn.functional.one_hot(choice.flatten(), count)
    place = (taken.cumsum(0) * taken).sum(-1)  # 1 for the first slot of its expert
    return (place <= capacity).view_as(choice)


def dropped(rank, world_size, skew, factors=(1.0, 1.25, 2.0), count=8):
    moe, _ = pass_layer(rank, world_size, count, 256, skew)
    even = moe.choice.numel() / count
    return [(~keep(moe.choice, count, math.ceil(f * even))).float().mean().item() for f in factors]


if __name__ == "__main__":
    run_as_script(main)
