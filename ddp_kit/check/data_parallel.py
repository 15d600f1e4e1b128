"""Graders of lesson 07: a scatter of uneven shards, and a loss in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.grader import SENT, Grader, by_size, exercise, same

WIDTH = 3
SHARDS = ([2, 1], [1, 2, 4], [3], [3, 3, 3, 1], [1, 5, 1, 2, 2])


def _on_ranks(sizes: list[int]) -> str:
    return by_size([len(each) for each in SHARDS])(len(sizes))


@exercise(
    "7.1",
    "scatter_batch(batch, sizes, width)",
    "one message for each rank but the first",
    on_failure="unmatched",
    collectives=False,
    cases=SHARDS,
    others=(SENT,),
    part=_on_ranks,
)
def _scatter_batch(grader: Grader, sizes: list[int]) -> None:
    n, batch = len(sizes), _batch(sum(sizes))
    case = f"scatter_batch(batch, {sizes}, {WIDTH})"
    found = grader.call([(None if rank else batch, sizes, WIDTH) for rank in range(n)], case)
    wanted = list(batch.split(sizes))
    grader.compare(wanted, found, _mistaken_shards(wanted, found), verb="return")
    sent = sum(shard.nbytes for shard in wanted[1:])
    grader.check_total_sent(n - 1, sent, "too much sent")


@exercise(
    "7.2",
    "part_of_loss(outputs, targets, total)",
    "for shards of different sizes",
    cases=SHARDS,
    part=_on_ranks,
)
def _part_of_loss(grader: Grader, sizes: list[int]) -> None:
    n, batch = len(sizes), _batch(sum(sizes))
    case = f"{grader.form} for shards of {sizes}"
    result = grader.run(_sum_gradients, batch, sizes, world_size=n, case=case)
    want = _gradient(batch, nn.functional.mse_loss)
    means = [_gradient(shard, nn.functional.mse_loss) for shard in batch.split(sizes)]
    summed = sum(means[1:], means[0])
    mistakes = {
        "no graph": not isinstance(result[0], torch.Tensor) or result[0].shape != (1, WIDTH),
        "sum of means": [summed] * n,
        "mean of means": [summed / n] * n,
        "not divided": len(batch) * want,
        "other loss": True,
    }
    grader.compare([want] * n, result, mistakes, place=" as the sum of all gradients")


def _batch(rows: int) -> torch.Tensor:
    """Return whole numbers, different in each row, so that sums are exact."""
    return torch.arange(float(rows * WIDTH)).view(rows, WIDTH)


def _mistaken_shards(wanted: list[torch.Tensor], found: list) -> str:
    if all(isinstance(shard, torch.Tensor) and shard.shape[1:] == (WIDTH,) for shard in found):
        if len(found) > 1 and same(torch.cat(wanted), torch.cat(found)):
            return "cut elsewhere"
        if any(shard.shape == want.shape for shard, want in zip(found, wanted, strict=True)):
            return "other order"
    return "not the shard"


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
