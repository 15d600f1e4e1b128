"""Layers whose weights are cut over the ranks, by hand: a part of lesson 16.

    f   CopyToRegion       nothing in the forward, all_reduce in the backward
    g   ReduceFromRegion   all_reduce in the forward, nothing in the backward

With sequence parallelism, GatherFromSequence and ReduceScatterToSequence replace them. In all
functions, `group` is a process group, by default that of all ranks. Sources: Shoeybi et al.,
"Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019),
arXiv 1909.08053; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), arXiv 2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from ddp_kit import device
from ddp_kit.lessons._gpt import GPT, Attention
from ddp_kit.lessons.device_mesh import (
    partial_to_shard,
    pieces,
    replicate_to_shard,
    shard_to_replicate,
)


class CopyToRegion(Function):
    """f: the input of layers that are cut; each rank's gradient is a summand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Return x as it is."""
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Add up the gradients of all ranks."""
        total = gradient.clone(memory_format=torch.contiguous_format)  # all_reduce needs it
        dist.all_reduce(total, group=ctx.group)
        return total, None


class ReduceFromRegion(Function):
    """g: the output of layers that are cut; each rank has a summand."""

    @staticmethod
    def forward(ctx: Any, summand: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Add up the summands of all ranks."""
        total = summand.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient as it is: that of a sum is that of each summand."""
        return gradient, None


class GatherFromSequence(Function):
    """f of sequence parallelism: each rank has a part of the positions, along dimension 1."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Gather the parts of all ranks, which are equally long."""
        ctx.group = group
        return shard_to_replicate(part, 1, part.shape[1] * dist.get_world_size(group), group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Add up the gradients of all ranks, and keep the own part."""
        return partial_to_shard(gradient, 1, ctx.group), None


class ReduceScatterToSequence(Function):
    """g of sequence parallelism: each rank gets a part of the positions of the sum."""

    @staticmethod
    def forward(ctx: Any, summand: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Add up the summands of all ranks, and keep the own part."""
        ctx.group = group
        return partial_to_shard(summand, 1, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gather the gradients of all parts."""
        length = gradient.shape[1] * dist.get_world_size(ctx.group)
        return shard_to_replicate(gradient, 1, length, ctx.group), None


TENSOR = (CopyToRegion, ReduceFromRegion)
SEQUENCE = (GatherFromSequence, ReduceScatterToSequence)


def own_part(parameter: nn.Parameter, dim: int, group: Any = None) -> nn.Parameter:
    """Return this rank's part of a parameter, cut along a dimension."""
    return nn.Parameter(replicate_to_shard(parameter.detach(), dim, group))


class ColumnParallelLinear(nn.Module):
    """Computes this rank's features of the output. Shapes: (..., inputs) to (..., outputs / n).

    enter: the function that the input passes, or None if it has passed one already.
    """

    def __init__(self, linear: nn.Linear, enter: Any = CopyToRegion, group: Any = None) -> None:
        super().__init__()
        self.enter, self.group, self.cut = enter, group, {"weight": 0, "bias": 0}
        self.weight = own_part(linear.weight, 0, group)
        self.bias = None if linear.bias is None else own_part(linear.bias, 0, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rank's own features."""
        if self.enter is not None:
            x = self.enter.apply(x, self.group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Adds up what the ranks compute of their own features of the input.

    Shapes: (..., inputs / n) to (..., outputs). leave: the function that the summand passes.
    """

    def __init__(self, linear: nn.Linear, leave: Any = ReduceFromRegion, group: Any = None) -> None:
        super().__init__()
        self.leave, self.group, self.cut = leave, group, {"weight": 1}
        self.weight, self.bias = own_part(linear.weight, 1, group), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum, and add the bias to it once."""
        y = self.leave.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def check_vocabulary(tokens: int, n: int) -> None:
    """Raise ValueError unless n ranks can share a vocabulary evenly."""
    if tokens % n:
        raise ValueError(
            f"{n} ranks cannot share a vocabulary of {tokens:,} tokens evenly: "
            f"pad it to {-(-tokens // n) * n:,}"
        )


class VocabularyParallelEmbedding(nn.Module):
    """Looks up the tokens of which this rank has the rows; the others are zero until the sum."""

    def __init__(
        self, embedding: nn.Embedding, leave: Any = ReduceFromRegion, group: Any = None
    ) -> None:
        super().__init__()
        check_vocabulary(embedding.num_embeddings, dist.get_world_size(group))
        self.leave, self.group, self.cut = leave, group, {"weight": 0}
        self.weight = own_part(embedding.weight, 0, group)
        self.first = dist.get_rank(group) * len(self.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the vectors of tokens, of any rank."""
        places = tokens - self.first
        here = (places >= 0) & (places < len(self.weight))
        rows = F.embedding(places.where(here, 0), self.weight)
        return self.leave.apply(rows * here.unsqueeze(-1), self.group)


def vocabulary_parallel_loss(
    logits: torch.Tensor, targets: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """Return the mean cross-entropy of logits (count, vocabulary / n) and targets (count).

    Three numbers per position are reduced, and the logits are never gathered. All ranks must have
    equally many logits: see `check_vocabulary`.
    """
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest.unsqueeze(-1)
    total = ReduceFromRegion.apply(shifted.exp().sum(-1), group)
    places = targets - dist.get_rank(group) * logits.shape[-1]
    here = (places >= 0) & (places < logits.shape[-1])
    picked = shifted.gather(-1, places.where(here, 0).unsqueeze(-1)).squeeze(-1)
    wanted = ReduceFromRegion.apply(picked * here, group)
    return (total.log() - wanted).mean()


def check_shares(model: nn.Module, n: int) -> None:
    """Raise ValueError unless n ranks can share the heads of a GPT, or of a block, evenly."""
    attention = next(module for module in model.modules() if isinstance(module, Attention))
    heads = attention.query.out_features // attention.head_width
    if heads % n:
        fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(
            f"{n} ranks cannot share {heads} attention heads evenly: "
            f"use a number of ranks that divides {heads}: {fitting}"
        )


def cut_block(block: nn.Module, regions: tuple[Any, Any] = TENSOR, group: Any = None) -> None:
    """Cut the attention and the two layers of a block, in place.

    The attention has one f, because query, key and value have the same input. Raises ValueError if
    the heads do not divide.
    """
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


def cut_gpt(model: GPT, regions: tuple[Any, Any] = TENSOR, group: Any = None) -> None:
    """Cut a GPT over the ranks, in place.

    Raises ValueError if the heads or the vocabulary do not divide.
    """
    enter, leave = regions
    tied = model.head.weight is model.tokens.weight
    for block in model.blocks:
        cut_block(block, regions, group)
    model.tokens = VocabularyParallelEmbedding(model.tokens, leave, group)
    model.head = ColumnParallelLinear(model.head, enter, group)
    if tied:
        model.head.weight = model.tokens.weight


def own_places(length: int, group: Any = None) -> torch.Tensor:
    """Return this rank's part of the positions, with sequence parallelism."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    return pieces(torch.arange(length, device=device()), 0, n)[rank]


def cut_along(model: nn.Module, name: str) -> int | None:
    """Return the dimension along which a parameter is cut; None if every rank has it whole."""
    module, _, own_name = name.rpartition(".")
    return getattr(model.get_submodule(module), "cut", {}).get(own_name)


def uncut(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that every rank holds whole."""
    return [p for name, p in model.named_parameters() if cut_along(model, name) is None]


def add_up_gradients(parameters: list[nn.Parameter], group: Any = None) -> None:
    """Add up the gradients of all ranks, of parameters that each has used for its own positions."""
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat, group=group)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, total in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad.copy_(total.view_as(parameter))


def gather_parameters(model: nn.Module, group: Any = None) -> dict[str, torch.Tensor]:
    """Return the whole parameters by name, on every rank."""
    n, whole = dist.get_world_size(group), {}
    for name, parameter in model.named_parameters():
        value, dim = parameter.detach().clone(), cut_along(model, name)
        if dim is not None:
            value = shard_to_replicate(value, dim, value.shape[dim] * n, group)
        whole[name] = value
    return whole
