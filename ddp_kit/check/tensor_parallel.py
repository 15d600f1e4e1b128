"""Graders of lesson 16: parts of weights, a row-parallel sum, and two backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_kit.check.grader import SENT, SIZES, Credit, Grader, same
from ddp_kit.errors import RankError

POSITIONS = 60  # of logits: divisible by all world sizes
KEPT = "the gradient that it gets stays as it is"
PRAISE = "right on 1, 2, 3, 4 and 5 ranks"


def exercise_16_1(own_heads: Callable[[torch.Tensor], Any]) -> Credit:
    """Grade `own_heads(weight)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("16.1", "own_heads(weight)", own_heads, collectives=True)
    for n in grader.each(SIZES, SENT):
        weight = torch.arange(1.0, 1 + 3 * 2 * n * 2 * n).view(3 * 2 * n, 2 * n)
        layers = weight.chunk(3)
        wanted = [torch.cat([layer.chunk(n)[rank] for layer in layers]) for rank in range(n)]
        result = grader.run(_cut, weight, world_size=n)
        hint = _hint_for_heads(weight, wanted, list(result))
        grader.compare(wanted, result, hint, verb="return")
        hint = "Every rank has the whole weight: nothing has to be sent."
        grader.check_at_most(" by rank 0", _sent(grader), 0, "byte", hint)
    return grader.passed(PRAISE)


def exercise_16_2(row_parallel: Callable[..., Any]) -> Credit:
    """Grade `row_parallel(x, weight, bias)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("16.2", "row_parallel(x, weight, bias)", row_parallel, collectives=True)
    for n in grader.each(SIZES, SENT):
        result = grader.run(_add_up, world_size=n)
        held = [_factors(rank, n) for rank in range(n)]
        summands, bias = [x @ weight.T for x, weight, _ in held], held[0][2]
        wanted = list((sum(summands) + bias).chunk(n, dim=1))
        hint = _hint_for_sum(summands, bias, list(result))
        grader.compare(wanted, result, hint, verb="return")
        enough = summands[0].nbytes * (n - 1) // n
        hint = (
            "Every rank needs its positions of the sum only: a reduce_scatter of the parts. "
            "An all_reduce sends twice as much."
        )
        grader.check_at_most(" by rank 0", _sent(grader), enough, "byte", hint)
    return grader.passed(f"{PRAISE}, and no position is sent where it is not needed")


def exercise_16_3(backward: Callable[[Any, torch.Tensor], Any]) -> Credit:
    """Grade `backward(ctx, gradient)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("16.3", "backward(ctx, gradient)", backward, collectives=True)
    for n in grader.each(SIZES, KEPT, SENT):
        held = [torch.arange(1.0, 9).view(2, 2, 2) + 10 * rank for rank in range(n)]
        result = grader.run(_go_back, held, world_size=n)
        wanted = [torch.cat(held, dim=1)] * n
        found = [value for value, _ in result]
        grader.compare(wanted, found, _hint_for_backward(held, found), verb="return")
        hint = "Leave the gradient as it is: autograd may use it elsewhere as well."
        grader.compare(held, [kept for _, kept in result], hint, "hold", " in gradient", KEPT)
        enough = (n - 1) * held[0].nbytes
        hint = (
            "Each number of the gradient is on one rank only, so nothing has to be added up: an "
            "all_gather sends half of what an all_reduce does."
        )
        grader.check_at_most(" by rank 0", _sent(grader), enough, "byte", hint)
    return grader.passed(PRAISE)


def exercise_16_4(loss_gradient: Callable[..., Any]) -> Credit:
    """Grade `loss_gradient(logits, targets)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    hints: dict = {RankError: _hint_for_index}
    grader = Grader("16.4", "loss_gradient(logits, targets)", loss_gradient, hints, True)
    for n in grader.each(SIZES, SENT):
        logits, targets = _logits(n)
        result = grader.run(_differentiate, world_size=n)
        x = logits.clone().requires_grad_()
        torch.nn.functional.cross_entropy(x, targets).backward()
        assert x.grad is not None
        wanted = list(x.grad.chunk(n, dim=1))
        grader.compare(wanted, result, _hint_for_loss(n, list(result)), verb="return")
        enough = 2 * 2 * (n - 1) * len(targets) * logits.itemsize // n
        hint = "Two numbers per position are enough: the maximum, and the sum of the exponentials."
        grader.check_at_most(" by rank 0", _sent(grader), enough, "byte", hint)
    return grader.passed(f"{PRAISE}, with two numbers per position")


def _sent(grader: Grader) -> int:
    return round(sum(row.sent for row in grader.result.trace.summary(rank=0).rows))


def _cut(rank: int, world_size: int, own_heads: Callable, weight: torch.Tensor) -> Any:
    return own_heads(weight.clone())


def _factors(rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's features of the input, its columns of the weight, and the whole bias."""
    x = (torch.arange(2 * n * 2 * n * 2).view(2 * n, 2 * n, 2) % 7 + rank).float()
    weight = (torch.arange(6).view(3, 2) + 10 * rank).float()
    return x, weight, torch.tensor([1000.0, 2000.0, 3000.0])


def _add_up(rank: int, world_size: int, row_parallel: Callable) -> Any:
    return row_parallel(*_factors(rank, world_size))


def _go_back(rank: int, world_size: int, backward: Callable, held: list[torch.Tensor]) -> Any:
    gradient = held[rank].clone()
    return backward(None, gradient), gradient


def _logits(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of some positions for 4 n tokens, and a target for each."""
    generator = torch.Generator().manual_seed(n)
    logits = torch.randn(POSITIONS, 4 * n, generator=generator, dtype=torch.float64)
    logits[0] += 1000  # exp would overflow
    targets = torch.randint(4 * n, (POSITIONS,), generator=generator)
    targets[0], targets[1] = 0, 4 * n - 1
    return logits, targets


def _differentiate(rank: int, world_size: int, loss_gradient: Callable) -> Any:
    logits, targets = _logits(world_size)
    return loss_gradient(logits.chunk(world_size, dim=1)[rank].clone(), targets)


def _all_same(wanted: list, found: list) -> bool:
    return all(map(same, wanted, found))


def _hint_for_heads(weight: torch.Tensor, wanted: list, found: list) -> str:
    n = len(wanted)
    layers = weight.chunk(3)
    if _all_same(list(weight.chunk(n)), found):
        return (
            "Those are neighbouring rows of all three: rank 0 has the query, and others the value. "
            "Take the weight apart into query, key and value first, and cut each of them."
        )
    if _all_same(list(weight.chunk(n, dim=1)), found) or _all_same(
        [torch.cat([layer.chunk(n, dim=1)[rank] for layer in layers]) for rank in range(n)], found
    ):
        return (
            "Those are columns of `weight`: features of the input. nn.Linear has a row for each "
            "feature of the output, so column-parallel means rows of `weight`."
        )
    if all(same(weight, have) for have in found):
        return "That is the whole weight on every rank."
    if any(_all_same(list(layer.chunk(n)), found) for layer in layers):
        return "That is one of the three layers only: put the parts of all three together."
    return (
        "The rows are the query's, then the key's, then the value's. Return this rank's part of "
        "each, in the same order, as one tensor."
    )


def _hint_for_sum(summands: list[torch.Tensor], bias: torch.Tensor, found: list) -> str:
    n = len(summands)
    total, own = sum(summands), range(n)
    cut = list(total.chunk(n, dim=1))
    guesses = [
        ([part + n * bias for part in cut], "The bias is in it once for each rank: add it once."),
        (cut, "The bias is missing: add it to the sum."),
        ([total + bias] * n, "Those are all positions: each rank should return its own part."),
        ([total + n * bias] * n, "Those are all positions, and the bias is in it n times."),
        (
            [summands[r].chunk(n, dim=1)[r] + bias for r in own],
            "That is this rank's summand: add up over the ranks, too.",
        ),
        (
            [summands[r] + bias for r in own],
            "That is this rank's summand, for all positions. Add up over the ranks.",
        ),
        (
            list((total + bias).chunk(n)),
            "Those are sequences of the batch. The positions are dimension 1.",
        ),
    ]
    for wrong, hint in guesses:
        if _all_same(wrong, found):
            return hint
    return (
        "x @ weight.T is a summand of the output. Cut it into n parts along dimension 1, pass "
        "these to reduce_scatter, and add the bias to what arrives."
    )


def _hint_for_backward(held: list[torch.Tensor], found: list) -> str:
    n = len(held)
    blank = torch.zeros_like(held[0])
    alone = [
        torch.cat([held[rank] if place == rank else blank for place in range(n)], dim=1)
        for rank in range(n)
    ]
    guesses = [
        (held, "That is the gradient of this rank's positions: gather those of the others."),
        (
            alone,
            "The positions of the others have zeros, which is what autograd does for `chunk`. But "
            "each rank has the whole input, and needs the gradient of all positions.",
        ),
        ([sum(held)] * n, "Those are different positions: they are joined, and not added up."),
        (
            [torch.cat(held)] * n,
            "Those are joined along the batch. The positions are dimension 1.",
        ),
        ([n * torch.cat(held, dim=1)] * n, "Every number is there n times: do not add them up."),
    ]
    for wrong, hint in guesses:
        if _all_same(wrong, found):
            return hint
    return (
        "The forward keeps this rank's positions of an input that all ranks have. Gather the "
        "gradients of all ranks, and join them along dimension 1."
    )


def _hint_for_index(error: RankError) -> str:
    messages = " ".join(failure.message for failure in error.failures.values())
    if "out of bounds" in messages or "out of range" in messages:
        return (
            "A target may be in another rank's part of the vocabulary. Compare the targets with "
            "the numbers of this rank's tokens."
        )
    return ""


def _hint_for_loss(n: int, found: list) -> str:
    logits, targets = _logits(n)
    parts = logits.chunk(n, dim=1)
    width = parts[0].shape[1]
    hot = torch.nn.functional.one_hot(targets, n * width).double()
    own_hot = torch.nn.functional.one_hot(targets % width, width).double()
    right = logits.softmax(1).chunk(n, dim=1)
    hots = hot.chunk(n, dim=1)
    shifted = [(part - part.amax(1, keepdim=True)).exp() for part in parts]
    total = sum(part.sum(1, keepdim=True) for part in shifted)

    def gradients(probabilities: Any, wanted: Any = hots) -> list[torch.Tensor]:
        pairs = zip(probabilities, wanted, strict=True)
        return [(share - one) / len(targets) for share, one in pairs]

    guesses = [
        (
            gradients([part.softmax(1) for part in parts]),
            "The probabilities add up to one on each rank: add up the exponentials of all ranks.",
        ),
        (
            gradients([part / total for part in shifted]),
            "Each rank has subtracted a maximum of its own. All must subtract the same one: reduce "
            "it, with ReduceOp.MAX.",
        ),
        (
            gradients(right, [own_hot] * n),
            "Every rank has subtracted 1, but a target is in the part of one rank only. Compare "
            "the targets with the numbers of this rank's tokens.",
        ),
        (
            gradients(right, [torch.zeros_like(own_hot)] * n),
            "Those are the probabilities: subtract 1 at the target, where it is in this part.",
        ),
        (
            [len(targets) * gradient for gradient in gradients(right)],
            "The loss is the mean over the positions: divide by their number.",
        ),
        ([-gradient for gradient in gradients(right)], "The sign is wrong."),
    ]
    for wrong, hint in guesses:
        if _all_same(wrong, found):
            return hint
    tensors = [have for have in found if isinstance(have, torch.Tensor)]
    if any(not have.isfinite().all() for have in tensors):
        return (
            "The exponential of 1000 is infinite. Subtract the largest logit of all ranks from "
            "all logits first; it cancels."
        )
    return (
        "The gradient is the softmax, over all ranks, minus 1 at the target, divided by the number "
        "of positions. The softmax needs the maximum and the sum of all ranks."
    )
