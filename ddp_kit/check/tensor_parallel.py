"""Graders of lesson 16: layers, norms, a loss and a block that are cut."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ddp_kit.check.compared import compared, hunt
from ddp_kit.check.grader import SENT, Grader, exercise, own_group
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


@exercise(
    "16.2",
    "row_parallel(x, weight, bias)",
    "and no position is sent where it is not needed",
    others=(SENT,),
)
def _row_parallel(grader: Grader, n: int) -> None:
    held = [_factors(rank, n) for rank in range(n)]
    found = grader.call(held)
    summands, bias = [x @ weight.T for x, weight, _ in held], held[0][2]
    total = sum(summands)
    cut = list(total.chunk(n, dim=1))
    own = [summand.chunk(n, dim=1)[rank] for rank, summand in enumerate(summands)]
    mistakes = {
        "bias on each rank": [part + n * bias for part in cut],
        "no bias": cut,
        "all positions": total + bias,
        "all positions and biases": total + n * bias,
        "not summed": [summand + bias for summand in own],
        "own summand": [summand + bias for summand in summands],
        "sequences": list((total + bias).chunk(n)),
        "other value": True,
    }
    grader.compare([part + bias for part in cut], found, mistakes, verb="return")
    grader.check_sent(summands[0].nbytes * (n - 1) // n, "too many bytes")


def _factors(rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's features of the input, its columns of the weight, and the whole bias."""
    x = (torch.arange(2 * n * 2 * n * 2).view(2 * n, 2 * n, 2) % 7 + rank).float()
    weight = (torch.arange(6).view(3, 2) + 10 * rank).float()
    return x, weight, torch.tensor([1000.0, 2000.0, 3000.0])


@compared("16.3", "rms_norm(x, weight)")
def _rms_norm(rank: int, n: int, rms_norm: Callable) -> dict:
    x = (torch.arange(6.0 * n).view(1, 3, 2 * n) % 5 + 1)[..., 2 * rank : 2 * rank + 2]
    x = x.double().requires_grad_()
    weight = torch.tensor([1.0 + rank, -2.0]).double().requires_grad_()
    y = rms_norm(x, weight)
    (y * torch.arange(1.0, 7).view_as(y) * (rank + 1)).sum().backward()
    return {"the norm": y.detach(), "the gradient of x": x.grad, "that of weight": weight.grad}


@exercise(
    "16.4",
    "loss_gradient(logits, targets)",
    "with two numbers per position",
    on_failure={RankError: dict.fromkeys(("out of bounds", "out of range"), "target as index")},
    others=(SENT,),
)
def _loss_gradient(grader: Grader, n: int) -> None:
    logits, targets = _logits(n)
    parts = logits.chunk(n, dim=1)
    found = grader.call([(part.clone(), targets) for part in parts])
    wanted = _gradients(logits.softmax(1).chunk(n, dim=1), targets)
    mistakes = _mistakes_in_loss(parts, targets, wanted, found)
    grader.compare(wanted, found, mistakes, verb="return")
    needed = 2 * 2 * (n - 1) * POSITIONS * logits.itemsize // n
    grader.check_sent(needed, "too many bytes")


def _logits(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of some positions for 4 n tokens, and a target for each."""
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(POSITIONS, 4 * n, generator=generator, dtype=torch.float64)
    logits[0] += 1000  # exp would overflow
    targets = torch.randint(4 * n, (POSITIONS,), generator=generator)
    targets[0], targets[1] = 0, 4 * n - 1
    return logits, targets


def _gradients(probabilities: Any, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the ranks' logits, made of their probabilities."""
    n, width = len(probabilities), probabilities[0].shape[1]
    hot = torch.nn.functional.one_hot(targets, n * width).chunk(n, dim=1)
    return [(share - one) / POSITIONS for share, one in zip(probabilities, hot, strict=True)]


def _mistakes_in_loss(parts: Any, targets: torch.Tensor, wanted: list, found: list) -> dict:
    n, width = len(parts), parts[0].shape[1]
    own_hot = torch.nn.functional.one_hot(targets % width, width)
    right = torch.cat(parts, dim=1).softmax(1).chunk(n, dim=1)
    shifted = [(part - part.amax(1, keepdim=True)).exp() for part in parts]
    total = sum(part.sum(1, keepdim=True) for part in shifted)
    tensors = [have for have in found if isinstance(have, torch.Tensor)]
    return {
        "own sum": _gradients([part.softmax(1) for part in parts], targets),
        "own maximum": _gradients([part / total for part in shifted], targets),
        "target on every rank": [(share - own_hot) / POSITIONS for share in right],
        "no target": [share / POSITIONS for share in right],
        "not divided": [POSITIONS * gradient for gradient in wanted],
        "wrong sign": [-gradient for gradient in wanted],
        "no maximum": any(not have.isfinite().all() for have in tensors),
        "other value": True,
    }


hunt("16.10", "16.11")


@compared("16.a", "CopyToRegion(Function)")
def _copy_to_region(rank: int, n: int, function: Any) -> dict:
    alone = own_group(rank, n)
    given = torch.arange(6.0).view(3, 2).T + 10 * rank  # not contiguous
    found = {}
    for name, group in (("all ranks", None), ("a group of one rank", alone)):
        x, gradient = torch.ones(2, 3, requires_grad=True), given.clone()
        y = function.apply(x, group)
        y.backward(gradient)
        found |= {f"x.grad, {name}": x.grad, f"the gradient that came, {name}": gradient}
    return found


@compared("16.b", "RowParallelLinear(linear)")
def _row_parallel_linear(rank: int, n: int, layer: Callable) -> dict:
    found = {}
    for name, bias, leave in (
        ("with a bias", True, lesson.ReduceFromRegion),
        ("without a bias", False, lesson.ReduceFromRegion),
        ("with sequence parallelism", True, lesson.ReduceScatterToSequence),
    ):
        torch.manual_seed(0)
        linear, x = nn.Linear(6, 3, bias=bias).double(), torch.randn(2, 6, 6).double()
        x = x.chunk(n, dim=-1)[rank].clone().requires_grad_()
        row = layer(linear, leave)
        y = row(x)
        (y * (1 + torch.arange(3))).sum().backward()
        found |= {f"the output {name}": y.detach(), f"the gradient of x {name}": x.grad}
        found[f"that of the weight {name}"] = row.weight.grad
    return found


@compared("16.c", "vocabulary_parallel_loss(logits, targets)")
def _vocabulary_parallel_loss(rank: int, n: int, loss_of: Callable) -> dict:
    logits, targets = _logits(n)
    logits, found = logits[:6], {}
    for name, shift in (("", 0.0), (" of large logits", 1000.0)):
        own = (logits - logits.amax() + shift).chunk(n, dim=1)[rank].clone().requires_grad_()
        loss = loss_of(own, targets[:6])
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
    gradients = {f"{name}.grad": _whole(p.grad) for name, p in block.named_parameters()}
    output = y.to_local() if isinstance(y, DTensor) else y
    return {"its positions of the output": output.detach(), "x.grad": x.grad, **gradients}


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
