"""Graders of lesson 16: layers, norms, a loss and a block that are cut."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ddp_kit.check.compared import compared, hunt
from ddp_kit.check.grader import SIZES, own_group
from ddp_kit.errors import RankError
from ddp_kit.lessons import tensor_parallel as lesson
from ddp_kit.lessons._tensor_parallel import LlamaBlock

POSITIONS = 60  # of logits: divisible by all world sizes


@compared("16.1", "own_heads(weight, heads, groups)", sizes=(2, 4))
def _own_heads(rank: int, n: int, own_heads: Callable) -> dict:
    def numbered(heads: int, groups: int) -> torch.Tensor:
        return torch.arange((heads + 2 * groups) * 4.0).view(-1, 2)

    few, many = numbered(4, 2), numbered(8, 4)
    return {"4 heads, 2 groups": own_heads(few, 4, 2), "8 heads, 4 groups": own_heads(many, 8, 4)}


@compared(
    "16.2",
    "row_parallel(x, weight, bias)",
    "and no position is sent where it is not needed",
    sizes=SIZES,
    spare=1,
)
def _row_parallel(rank: int, n: int, row_parallel: Callable) -> torch.Tensor:
    x = (torch.arange(2 * n * 2 * n * 2).view(2 * n, 2 * n, 2) % 7 + rank).float()
    weight = (torch.arange(6).view(3, 2) + 10 * rank).float()
    return row_parallel(x, weight, torch.tensor([1000.0, 2000.0, 3000.0]))


@compared("16.3", "rms_norm(x, weight)")
def _rms_norm(rank: int, n: int, rms_norm: Callable) -> dict:
    x = (torch.arange(6.0 * n).view(1, 3, 2 * n) % 5 + 1)[..., 2 * rank : 2 * rank + 2]
    x = x.double().requires_grad_()
    weight = torch.tensor([1.0 + rank, -2.0]).double().requires_grad_()
    y = rms_norm(x, weight)
    (y * torch.arange(1.0, 7).view_as(y) * (rank + 1)).sum().backward()
    return {"the norm": y.detach(), "the gradient of x": x.grad, "that of weight": weight.grad}


@compared(
    "16.4",
    "loss_gradient(logits, targets)",
    "with two numbers per position",
    on_failure={RankError: dict.fromkeys(("out of bounds", "out of range"), "target as index")},
    sizes=SIZES,
    spare=1,
)
def _loss_gradient(rank: int, n: int, loss_gradient: Callable) -> torch.Tensor:
    logits, targets = _logits(n)
    return loss_gradient(logits.chunk(n, dim=1)[rank].clone(), targets)


def _logits(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of some positions for 4 n tokens, and a target for each."""
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(POSITIONS, 4 * n, generator=generator, dtype=torch.float64)
    logits[0] += 1000  # exp would overflow
    targets = torch.randint(4 * n, (POSITIONS,), generator=generator)
    targets[0], targets[1] = 0, 4 * n - 1
    return logits, targets


hunt("16.10", "16.11")


@compared("16.a", "CopyToRegion(Function)")
def _copy_to_region(rank: int, n: int, function: Any) -> dict:
    alone = own_group(rank, n)
    strided = torch.arange(6.0).view(3, 2).T + 10 * rank
    found = {}
    for name, group, given in (
        ("all ranks", None, strided),
        ("all ranks, from contiguous memory", None, strided.contiguous()),
        ("a group of one rank", alone, strided),
        ("other strides on rank 0", None, strided.contiguous() if rank else strided),
    ):
        x, gradient = torch.ones(2, 3, requires_grad=True), given.clone()
        y = function.apply(x, group)
        y.backward(gradient)
        found |= {f"x.grad, {name}": x.grad, f"the gradient that came, {name}": gradient}
    return found


@compared("16.b", "RowParallelLinear(linear)")
def _row_parallel_linear(rank: int, n: int, layer: Callable) -> dict:
    found, alone = {}, own_group(rank, n)
    for name, bias, leave, group in (
        ("with a bias", True, lesson.ReduceFromRegion, None),
        ("without a bias", False, lesson.ReduceFromRegion, None),
        ("with sequence parallelism", True, lesson.ReduceScatterToSequence, None),
        ("in a group of one rank", True, lesson.ReduceFromRegion, alone),
    ):
        torch.manual_seed(0)
        linear, x = nn.Linear(6, 3, bias=bias).double(), torch.randn(2, 6, 6).double()
        x = x.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)]
        x = x.clone().requires_grad_()
        row = layer(linear, leave, group)
        y = row(x)
        (y * (1 + torch.arange(3))).sum().backward()
        found |= {f"the output {name}": y.detach(), f"the gradient of x {name}": x.grad}
        found[f"that of the weight {name}"] = row.weight.grad
        if bias and leave is lesson.ReduceFromRegion:
            found[f"that of the bias {name}"] = getattr(row.bias, "grad", None)
    return found


@compared("16.c", "vocabulary_parallel_loss(logits, targets)")
def _vocabulary_parallel_loss(rank: int, n: int, loss_of: Callable) -> dict:
    logits, targets = _logits(n)
    logits, found, alone = logits[:6], {}, own_group(rank, n)
    for name, shift, group in (
        ("", 0.0, None),
        (" of large logits", 1000.0, None),
        (" in a group of one rank", 0.0, alone),
    ):
        own = (logits - logits.amax() + shift).chunk(dist.get_world_size(group), dim=1)
        own = own[dist.get_rank(group)].clone().requires_grad_()
        loss = loss_of(own, targets[:6], group)
        loss.backward()
        found |= {f"the loss{name}": loss.detach(), f"the gradient{name}": own.grad}
    return found


TENSOR_RANKS = 2  # of the mesh of 16.12


@compared("16.12", "parallelize(block, mesh)", kind="function", sizes=(2, 4), spare=1.1)
def _parallelize(rank: int, n: int, parallelize: Callable) -> dict:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # fully_shard's, of views
    shape = (n // TENSOR_RANKS, TENSOR_RANKS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    block, x = LlamaBlock().double(), torch.randn(4, 6, 16).double()
    parallelize(block, mesh)
    mine = x.chunk(shape[0])[mesh["dp"].get_local_rank()]
    x = mine.chunk(TENSOR_RANKS, dim=1)[mesh["tp"].get_local_rank()].clone().requires_grad_()
    y = block(x)
    y.square().sum().backward()
    gradients = {f"{name}.grad": lesson.whole(p.grad) for name, p in block.named_parameters()}
    output = y.to_local() if isinstance(y, DTensor) else y
    return {"its positions of the output": output.detach(), "x.grad": x.grad, **gradients}
