"""The proof of the lesson on partitioned SGD."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_kit import compare
from ddp_kit.lessons._digits import first_digits, flat
from ddp_kit.lessons._launch import Ranks, lesson_main, prove


def whole_batch_gradient(count: int) -> torch.Tensor:
    """Return the gradient of one batch of `count` digits, in this one process."""
    return lesson.mean_gradient(0, 1, lesson.keep_gradients, [count])


def train_beside_ddp(rank: int, world_size: int) -> list[torch.Tensor]:
    """Train one replica by `average_gradients` and one by DDP; return both, each flat."""
    images, labels = (part[rank::world_size] for part in first_digits(32 * world_size))
    replicas = []
    wraps = {lesson.average_gradients: None, lesson.keep_gradients: DistributedDataParallel}
    for average, wrap in wraps.items():
        model, optimizer = lesson.new_replica(wrap, 0.01, 0.5)
        for _ in range(20):
            lesson.train_step(model, optimizer, images, labels, average)
        replicas.append(flat(model.parameters()))
    return replicas


@lesson_main("partitioned_sgd")
def main(ranks: Ranks) -> str:
    """Train, compare with one process and with DDP, and print one line."""
    whole = whole_batch_gradient(32 * ranks.world_size)
    mean = compare(ranks(lesson.mean_gradient), whole)
    prove("the mean of the shards' gradients is the batch's gradient", mean)
    by_hand, by_ddp = zip(*ranks(train_beside_ddp), strict=True)
    prove("average_gradients equals DDP", compare(list(by_hand), by_ddp[0]))
    same = compare(list(by_hand), by_hand[0], rtol=0, atol=0)
    prove("all replicas are equal to the last bit", same)
    return "replicas bit-equal, gradients equal one process"


from ddp_kit.lessons import partitioned_sgd as lesson
