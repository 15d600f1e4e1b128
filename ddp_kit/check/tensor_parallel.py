"""Graders of lesson 16: parts of weights, a row-parallel sum, and two backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_kit.check.grader import SENT, Grader, exercise
from ddp_kit.errors import RankError

POSITIONS = 60  # of logits: divisible by all world sizes
KEPT = "the gradient that it gets stays as it is"


@exercise("16.1", "own_heads(weight)", others=(SENT,))
def _own_heads(grader: Grader, n: int) -> None:
    weight = torch.arange(1.0, 1 + 3 * 2 * n * 2 * n).view(3 * 2 * n, 2 * n)
    layers = weight.chunk(3)
    columns = [torch.cat([layer.chunk(n, dim=1)[r] for layer in layers]) for r in range(n)]
    hints = {
        "Those are neighbouring rows of all three: rank 0 has the query, and others the value. "
        "Take the weight apart into query, key and value first, and cut each of "
        "them.": list(weight.chunk(n)),
        "Those are columns of `weight`: features of the input. nn.Linear has a row for each "
        "feature of the output, so column-parallel means rows of `weight`.": (
            list(weight.chunk(n, dim=1)),
            columns,
        ),
        "That is the whole weight on every rank.": weight,
        "That is one of the three layers only: put the parts of all three together.": tuple(
            list(layer.chunk(n)) for layer in layers
        ),
        "The rows are the query's, then the key's, then the value's. Return this rank's part "
        "of each, in the same order, as one tensor.": True,
    }
    wanted = [torch.cat([layer.chunk(n)[rank] for layer in layers]) for rank in range(n)]
    grader.compare(wanted, grader.call([(weight,)] * n), hints, verb="return")
    grader.check_sent(0, "Every rank has the whole weight: nothing has to be sent.")


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
    hints = {
        "The bias is in it once for each rank: add it once.": [part + n * bias for part in cut],
        "The bias is missing: add it to the sum.": cut,
        "Those are all positions: each rank should return its own part.": total + bias,
        "Those are all positions, and the bias is in it n times.": total + n * bias,
        "That is this rank's summand: add up over the ranks, too.": [x + bias for x in own],
        "That is this rank's summand, for all positions. Add up over the ranks.": (
            [summand + bias for summand in summands]
        ),
        "Those are sequences of the batch. The positions are dimension 1.": (
            list((total + bias).chunk(n))
        ),
        "x @ weight.T is a summand of the output. Cut it into n parts along dimension 1, pass "
        "these to reduce_scatter, and add the bias to what arrives.": True,
    }
    grader.compare([part + bias for part in cut], found, hints, verb="return")
    grader.check_sent(
        summands[0].nbytes * (n - 1) // n,
        "Every rank needs its positions of the sum only: a reduce_scatter of the parts. "
        "An all_reduce sends twice as much.",
    )


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
    hints = {
        "That is the gradient of this rank's positions: gather those of the others.": held,
        "The positions of the others have zeros, which is what autograd does for `chunk`. But "
        "each rank has the whole input, and needs the gradient of all positions.": padded,
        "Those are different positions: they are joined, and not added up.": sum(held),
        "Those are joined along the batch. The positions are dimension 1.": ([torch.cat(held)] * n),
        "Every number is there n times: do not add them up.": n * whole,
        "The forward keeps this rank's positions of an input that all ranks have. Gather the "
        "gradients of all ranks, and join them along dimension 1.": True,
    }
    grader.compare([whole] * n, [value for value, _ in result], hints, verb="return")
    hint = "Leave the gradient as it is: autograd may use it elsewhere as well."
    grader.compare(held, [kept for _, kept in result], hint, "hold", " in gradient", KEPT)
    grader.check_sent(
        (n - 1) * held[0].nbytes,
        "Each number of the gradient is on one rank only, so nothing has to be added up: an "
        "all_gather sends half of what an all_reduce does.",
    )


def _go_back(rank: int, world_size: int, backward: Callable, held: list[torch.Tensor]) -> Any:
    return backward(None, held[rank]), held[rank]


def _hint_for_index(error: RankError) -> str:
    messages = " ".join(failure.message for failure in error.failures.values())
    if "out of bounds" in messages or "out of range" in messages:
        return (
            "A target may be in another rank's part of the vocabulary. Compare the targets with "
            "the numbers of this rank's tokens."
        )
    return ""


@exercise(
    "16.4",
    "loss_gradient(logits, targets)",
    "with two numbers per position",
    on_failure={RankError: _hint_for_index},
    others=(SENT,),
)
def _loss_gradient(grader: Grader, n: int) -> None:
    logits, targets = _logits(n)
    parts = logits.chunk(n, dim=1)
    found = grader.call([(part.clone(), targets) for part in parts])
    wanted = _gradients(logits.softmax(1).chunk(n, dim=1), targets)
    hints = _hints_for_loss(parts, targets, wanted, found)
    grader.compare(wanted, found, hints, verb="return")
    hint = "Two numbers per position are enough: the maximum, and the sum of the exponentials."
    grader.check_sent(2 * 2 * (n - 1) * POSITIONS * logits.itemsize // n, hint)


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


def _hints_for_loss(parts: Any, targets: torch.Tensor, wanted: list, found: list) -> dict:
    n, width = len(parts), parts[0].shape[1]
    own_hot = torch.nn.functional.one_hot(targets % width, width)
    right = torch.cat(parts, dim=1).softmax(1).chunk(n, dim=1)
    shifted = [(part - part.amax(1, keepdim=True)).exp() for part in parts]
    total = sum(part.sum(1, keepdim=True) for part in shifted)
    tensors = [have for have in found if isinstance(have, torch.Tensor)]
    return {
        "The probabilities add up to one on each rank: add up the exponentials of all "
        "ranks.": _gradients([part.softmax(1) for part in parts], targets),
        "Each rank has subtracted a maximum of its own. All must subtract the same one: reduce "
        "it, with ReduceOp.MAX.": _gradients([part / total for part in shifted], targets),
        "Every rank has subtracted 1, but a target is in the part of one rank only. Compare "
        "the targets with the numbers of this rank's tokens.": (
            [(share - own_hot) / POSITIONS for share in right]
        ),
        "Those are the probabilities: subtract 1 at the target, where it is in this part.": (
            [share / POSITIONS for share in right]
        ),
        "The loss is the mean over the positions: divide by their number.": (
            [POSITIONS * gradient for gradient in wanted]
        ),
        "The sign is wrong.": [-gradient for gradient in wanted],
        "The exponential of 1000 is infinite. Subtract the largest logit of all ranks from "
        "all logits first; it cancels.": any(not have.isfinite().all() for have in tensors),
        "The gradient is the softmax, over all ranks, minus 1 at the target, divided by the number "
        "of positions. The softmax needs the maximum and the sum of all ranks.": True,
    }
