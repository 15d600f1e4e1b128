"""Graders of lesson 16: parts of weights, a row-parallel sum, and two backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_kit.check.compared import hunt
from ddp_kit.check.grader import SENT, Grader, exercise
from ddp_kit.errors import RankError

POSITIONS = 60  # of logits: divisible by all world sizes
KEPT = "the gradient that it gets stays as it is"


@exercise("16.1", "own_heads(weight)", others=(SENT,))
def _own_heads(grader: Grader, n: int) -> None:
    weight = torch.arange(1.0, 1 + 3 * 2 * n * 2 * n).view(3 * 2 * n, 2 * n)
    layers = weight.chunk(3)

    def cut(dim: int) -> list[torch.Tensor]:
        return [torch.cat([layer.chunk(n, dim)[rank] for layer in layers]) for rank in range(n)]

    mistakes = {
        "neighbouring rows": list(weight.chunk(n)),
        "columns": (list(weight.chunk(n, dim=1)), cut(1)),
        "whole weight": weight,
        "one layer": tuple(list(layer.chunk(n)) for layer in layers),
        "other rows": True,
    }
    grader.compare(cut(0), grader.call([(weight,)] * n), mistakes, verb="return")
    grader.check_sent(0, "something sent")


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


@exercise("16.3", "backward(ctx, gradient)", others=(KEPT, SENT))
def _backward(grader: Grader, n: int) -> None:
    held = [torch.arange(1.0, 9).view(2, 2, 2) + 10 * rank for rank in range(n)]
    result = grader.run(_go_back, held, world_size=n)
    whole, blank = torch.cat(held, dim=1), torch.zeros_like(held[0])
    padded = [
        torch.cat([own if place == rank else blank for place in range(n)], dim=1)
        for rank, own in enumerate(held)
    ]
    mistakes = {
        "own positions": held,
        "zeros": padded,
        "summed": sum(held),
        "sequences": [torch.cat(held)] * n,
        "joined and summed": n * whole,
        "other value": True,
    }
    grader.compare([whole] * n, [value for value, _ in result], mistakes, verb="return")
    kept = [gradient for _, gradient in result]
    grader.compare(held, kept, "gradient changed", "hold", " in gradient", KEPT)
    grader.check_sent((n - 1) * held[0].nbytes, "too many bytes")


def _go_back(rank: int, world_size: int, backward: Callable, held: list[torch.Tensor]) -> Any:
    return backward(None, held[rank]), held[rank]


def _index_error(error: RankError) -> str:
    messages = " ".join(failure.message for failure in error.failures.values())
    outside = "out of bounds" in messages or "out of range" in messages
    return "target as index" if outside else ""


@exercise(
    "16.4",
    "loss_gradient(logits, targets)",
    "with two numbers per position",
    on_failure={RankError: _index_error},
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


for _number in ("16.10", "16.11"):
    hunt(_number)
