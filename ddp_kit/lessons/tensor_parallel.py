# Made from notebooks/16_tensor_parallel.ipynb by `make editions`: edit that, not this.
"""Tensor parallelism: every layer on all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import ddp_kit as kit
from ddp_kit.lessons._gpt import batches, loss_of, make_gpt
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._tensor_parallel import (
    BATCH,
    CONFIG,
    LlamaAttention,
    LlamaBlock,
    SwiGLU,
    check_shares,
    draw_block,
    gather_parameters,
    held,
    main,
    own_places,
    train_alone,
    uncut,
    whole,
)
from ddp_kit.lessons.device_mesh import partial_to_shard, replicate_to_shard, shard_to_replicate
from ddp_kit.lessons.zero import ADAM


class CopyToRegion(Function):
    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx, partial_sum, group=None):
        total = partial_sum.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


TENSOR = (CopyToRegion, ReduceFromRegion)


def own_part(parameter, dim, group=None):
    return nn.Parameter(replicate_to_shard(parameter.detach(), dim, group))


class ColumnParallelLinear(nn.Module):
    def __init__(self, linear, enter=CopyToRegion, group=None):
        super().__init__()
        self.enter, self.group = enter, group
        self.cut = {"weight": 0, "bias": 0}
        self.weight = own_part(linear.weight, 0, group)
        self.bias = None if linear.bias is None else own_part(linear.bias, 0, group)

    def forward(self, x):
        if self.enter is not None:
            x = self.enter.apply(x, self.group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, linear, leave=ReduceFromRegion, group=None):
        super().__init__()
        self.leave, self.group = leave, group
        self.cut = {"weight": 1}
        self.weight, self.bias = own_part(linear.weight, 1, group), linear.bias

    def forward(self, x):
        partial_sum = F.linear(x, self.weight)
        y = self.leave.apply(partial_sum, self.group)
        return y if self.bias is None else y + self.bias


def cut_block(block, regions=TENSOR, group=None):
    check_shares(block, dist.get_world_size(group))
    enter, leave = regions
    attention = block.attention
    attention.register_forward_pre_hook(lambda _, inputs: enter.apply(inputs[0], group))
    for name in ("query", "key", "value"):
        whole = getattr(attention, name)
        setattr(attention, name, ColumnParallelLinear(whole, enter=None, group=group))
    attention.out = RowParallelLinear(attention.out, leave, group)
    block.up = ColumnParallelLinear(block.up, enter, group)
    block.down = RowParallelLinear(block.down, leave, group)


def run_block(rank, world_size, cut, sequence=False, config=CONFIG):
    block = make_gpt(config).blocks[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, config.context, config.width, generator=generator).to(kit.device())
    x = (x.chunk(world_size, dim=1)[rank] if sequence else x).requires_grad_()
    cut(block)
    y = block(x)
    y.square().sum().backward()
    return {"output": y.detach(), "gradient": x.grad}


class VocabularyParallelEmbedding(nn.Module):
    def __init__(self, embedding, leave=ReduceFromRegion, group=None):
        super().__init__()
        self.leave, self.group = leave, group
        self.cut = {"weight": 0}
        self.weight = own_part(embedding.weight, 0, group)
        self.first = dist.get_rank(group) * len(self.weight)

    def forward(self, tokens):
        places = tokens - self.first
        here = (places >= 0) & (places < len(self.weight))
        rows = F.embedding(places.where(here, 0), self.weight)
        return self.leave.apply(rows * here.unsqueeze(-1), self.group)


def vocabulary_parallel_loss(logits, targets, group=None):
    places = targets - dist.get_rank(group) * logits.shape[-1]
    here = (places >= 0) & (places < logits.shape[-1])
    places = places.where(here, 0)
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest.unsqueeze(-1)
    total = ReduceFromRegion.apply(shifted.exp().sum(-1), group)
    picked = shifted.gather(-1, places.unsqueeze(-1)).squeeze(-1)
    wanted = ReduceFromRegion.apply(picked * here, group)
    return (total.log() - wanted).mean()


def cut_gpt(model, regions=TENSOR, group=None):
    enter, leave = regions
    tied = model.head.weight is model.tokens.weight
    for block in model.blocks:
        cut_block(block, regions, group)
    model.tokens = VocabularyParallelEmbedding(model.tokens, leave, group)
    model.head = ColumnParallelLinear(model.head, enter, group)
    if tied:
        model.head.weight = model.tokens.weight


def nothing(*_):
    pass


def learn(
    rank,
    world_size,
    cut,
    optimizer_cls=ADAM,
    steps=3,
    dtype=torch.float32,
    config=CONFIG,
    places=nothing,
    finish=nothing,
):
    model = make_gpt(config).to(dtype)
    cut(model)
    optimizer, losses = optimizer_cls(model.parameters()), []
    for inputs, targets in batches(4, steps, config.context):
        optimizer.zero_grad()
        logits = model(inputs, places()).flatten(0, 1)
        loss = vocabulary_parallel_loss(logits, targets.flatten())
        loss.backward()
        finish(model)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": gather_parameters(model)}


class GatherFromSequence(Function):
    @staticmethod
    def forward(ctx, part, group=None):
        ctx.group = group
        return shard_to_replicate(part, 1, part.shape[1] * dist.get_world_size(group), group)

    @staticmethod
    def backward(ctx, gradient):
        return partial_to_shard(gradient, 1, ctx.group), None


class ReduceScatterToSequence(Function):
    @staticmethod
    def forward(ctx, partial_sum, group=None):
        ctx.group = group
        return partial_to_shard(partial_sum, 1, group)

    @staticmethod
    def backward(ctx, gradient):
        length = gradient.shape[1] * dist.get_world_size(ctx.group)
        return shard_to_replicate(gradient, 1, length, ctx.group), None


SEQUENCE = (GatherFromSequence, ReduceScatterToSequence)


def add_up_gradients(parameters, group=None):
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat, group=group)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, total in zip(parameters, flat.split(sizes)):
        parameter.grad.copy_(total.view_as(parameter))


def finish(model):
    add_up_gradients(uncut(model))


class ForgottenCopy(CopyToRegion):
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def forget(model):
    cut_gpt(model, (ForgottenCopy, ReduceFromRegion))


def block_plan(sequence=False):
    outside = Shard(1) if sequence else Replicate()
    plan = {
        "attention": PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=outside),
        "up": ColwiseParallel(input_layouts=outside),
        "down": RowwiseParallel(output_layouts=outside),
    }
    norms = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    return plan | norms if sequence else plan


def gpt_plan(sequence=False):
    outside = Shard(1) if sequence else Replicate()
    plan = {f"blocks.*.{name}": style for name, style in block_plan(sequence).items()}
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    plan["head"] = ColwiseParallel(
        input_layouts=outside, output_layouts=Shard(-1), use_local_output=False
    )
    if sequence:
        plan["norm"] = SequenceParallel()
        plan["positions"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(0)
        )
    return plan


def parallelize(model, mesh, sequence=False):
    tied = model.head.weight is model.tokens.weight
    parallelize_module(model, mesh, gpt_plan(sequence))
    if tied:
        model.head.weight = model.tokens.weight
    return model


def learn_with_plan(
    rank,
    world_size,
    sequence=False,
    optimizer_cls=ADAM,
    steps=3,
    dtype=torch.float32,
    config=CONFIG,
):
    mesh = init_device_mesh(kit.device().type, (world_size,))
    model = parallelize(make_gpt(config).to(dtype), mesh, sequence)
    # On a GPU, foreach would put DTensors and plain tensors into one call, which PyTorch refuses.
    optimizer, losses = optimizer_cls(model.parameters(), foreach=False), []
    for batch in batches(4, steps, config.context):
        optimizer.zero_grad()
        with loss_parallel():
            loss = loss_of(model, *batch)
            loss.backward()
        optimizer.step()
        losses.append(whole(loss).item())
    return {
        "losses": losses,
        "parameters": {name: whole(p).detach() for name, p in model.named_parameters()},
    }


if __name__ == "__main__":
    run_as_script(main)
