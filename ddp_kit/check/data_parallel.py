"""Graders of lesson 07: a scatter of uneven shards, and a loss in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.grader import SENT, Credit, Grader, by_size, same
from ddp_kit.errors import DeadlockError, MismatchError, RankError

WIDTH = 3
SHARDS = ([2, 1], [1, 2, 4], [3], [3, 3, 3, 1], [1, 5, 1, 2, 2])


def exercise_7_1(scatter_batch: Callable[[torch.Tensor | None, list[int], int], Any]) -> Credit:
    """Grade `scatter_batch(batch, sizes, width)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    hint = (
        "Rank 0 keeps its own shard, and sends one message to every other rank. Each of them "
        "receives one, into a tensor of sizes[rank] rows."
    )
    grader = Grader(
        "7.1",
        "scatter_batch(batch, sizes, width)",
        scatter_batch,
        hints=dict.fromkeys((RankError, DeadlockError, MismatchError), hint),
    )
    for sizes in grader.each(SHARDS, SENT, part=_on_ranks):
        n, batch = len(sizes), _batch(sum(sizes))
        case = f"scatter_batch(batch, {sizes}, {WIDTH})"
        result = grader.run(_scatter, batch, sizes, world_size=n, case=case)
        wanted = list(batch.split(sizes))
        grader.compare(wanted, result, _hint_for_shards(wanted, list(result)), verb="return")
        sent = sum(shard.nbytes for shard in wanted[1:])
        grader.check_total_sent(n - 1, sent, "Send each rank its own shard only, in one message.")
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, one message for each rank but the first")


def exercise_7_2(part_of_loss: Callable[[torch.Tensor, torch.Tensor, int], Any]) -> Credit:
    """Grade `part_of_loss(outputs, targets, total)` on 1 to 5 ranks with uneven shards.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    form = "part_of_loss(outputs, targets, total)"
    grader = Grader("7.2", form, part_of_loss, collectives=True)  # they add the gradients up
    for sizes in grader.each(SHARDS, part=_on_ranks):
        n, batch = len(sizes), _batch(sum(sizes))
        case = f"{grader.form} for shards of {sizes}"
        result = grader.run(_sum_gradients, batch, sizes, world_size=n, case=case)
        wanted = _gradient(batch, nn.functional.mse_loss)
        found = list(result)
        hint = _hint_for_parts(found[0], batch, sizes)
        grader.compare([wanted] * n, found, hint, place=" as the sum of all gradients")
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, for shards of different sizes")


def _on_ranks(sizes: list[int]) -> str:
    return by_size([len(each) for each in SHARDS])(len(sizes))


def _batch(rows: int) -> torch.Tensor:
    """Return whole numbers, different in each row, so that sums are exact."""
    return torch.arange(float(rows * WIDTH)).view(rows, WIDTH)


def _scatter(
    rank: int, world_size: int, scatter_batch: Callable, batch: torch.Tensor, sizes: list[int]
) -> Any:
    return scatter_batch(batch if rank == 0 else None, sizes, WIDTH)


def _hint_for_shards(wanted: list[torch.Tensor], found: list) -> str:
    if all(isinstance(shard, torch.Tensor) and shard.shape[1:] == (WIDTH,) for shard in found):
        if len(found) > 1 and same(torch.cat(wanted), torch.cat(found)):
            return "These are all rows, cut in other places: sizes[r] is the number for rank r."
        if any(shard.shape == want.shape for shard, want in zip(found, wanted, strict=True)):
            return "Rank 0 gets the first rows, rank 1 those that follow, and so on."
    return "Every rank returns its own shard, of shape (sizes[rank], width)."


def _model() -> nn.Linear:
    model = nn.Linear(WIDTH, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def _gradient(batch: torch.Tensor, loss_of: Callable) -> torch.Tensor:
    """Return the gradient of a loss of all rows; the target of a row is its first number."""
    model = _model()
    loss_of(model(batch), batch[:, :1]).backward()
    assert model.weight.grad is not None
    return model.weight.grad


def _sum_gradients(
    rank: int, world_size: int, part_of_loss: Callable, batch: torch.Tensor, sizes: list[int]
) -> Any:
    model, shard = _model(), batch.split(sizes)[rank]
    part = part_of_loss(model(shard), shard[:, :1], len(batch))
    if not isinstance(part, torch.Tensor) or not part.requires_grad or part.dim():
        return part
    part.backward()
    assert model.weight.grad is not None
    parts = [torch.empty_like(model.weight) for _ in range(world_size)]
    dist.all_gather(parts, model.weight.grad)
    return sum(parts[1:], parts[0])


def _hint_for_parts(found: Any, batch: torch.Tensor, sizes: list[int]) -> str:
    if not isinstance(found, torch.Tensor) or found.shape != (1, WIDTH):
        return "Return one number, a tensor that is computed from the outputs."
    means = [_gradient(shard, nn.functional.mse_loss) for shard in batch.split(sizes)]
    summed = sum(means[1:], means[0])
    if torch.allclose(found, summed):
        return (
            "That is the sum of the shards' means: a digit of a small shard counts more. Take the "
            "sum over the shard, and divide it by `total`."
        )
    if torch.allclose(found, summed / len(sizes)):
        return (
            "That is the mean of the shards' means, which is right for equal shards only. Take the "
            "sum over the shard, and divide it by `total`."
        )
    if torch.allclose(found, len(batch) * _gradient(batch, nn.functional.mse_loss)):
        return "That is the sum over all examples. The loss of the batch is their mean."
    return "The loss of a batch is the mean over its `total` examples of (output - target) ** 2."
