"""The proofs of the lesson on partitioned SGD, its controls, and the tutorial's experiment."""

from __future__ import annotations

import time

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_kit import compare, mnist
from ddp_kit.error_text import count
from ddp_kit.lessons._digits import first_digits, flat
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.notebook.controls import Explorer, positive

USUAL_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)


def explore(world_size: int = 4, lr: float = 0.03) -> Explorer:
    """Train for 24 steps and draw the loss of the whole batch.

    In JupyterLab, controls follow. Raises PoolError for an invalid choice.
    """
    from ddp_kit import plot  # ranks do not need it

    def draw(result, settings):
        ranks = count(settings["world_size"], "rank")
        title = f"The first steps of {ranks} with learning rate {settings['lr']:g}"
        return plot.losses({"whole batch": result[0]["losses"]}, title, "step", "loss")

    rates = positive("lr", lr, USUAL_RATES)
    return Explorer(
        "partitioned_sgd",
        {"world_size": world_size, "lr": lr},
        choices=lambda settings: {"world_size": range(1, max(8, world_size) + 1), "lr": rates},
        ask=lambda settings: (lesson.first_steps, settings["lr"]),
        draw=draw,
    )


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


def repeat_tutorial(ranks: Ranks, epochs: int = 10) -> None:
    """Train on all 60,000 digits; print the mean loss of each epoch, and the test accuracy.

    Raises DataError as `kit.mnist` does.
    """
    mnist(full=True)  # an error comes before any rank starts
    start = time.perf_counter()
    replicas = ranks(lesson.train, lesson.average_gradients, None, epochs, 0.01, 0.5, True)
    seconds = time.perf_counter() - start
    by_epoch = zip(*(replica["losses"] for replica in replicas), strict=True)
    for epoch, losses in enumerate(by_epoch, 1):
        ranks.say(f"epoch {epoch:2}  loss {sum(losses) / len(losses):.4f}")
    right = replicas[0]["accuracy"]
    ranks.say(f"{ranks}: {right:.2%} of the test digits are right, in {seconds:.0f} s")


@lesson_main(
    "partitioned_sgd",
    tutorial={
        "action": "store_true",
        "help": "train as the tutorial does: 10 epochs on all 60,000 digits of MNIST; takes "
        "minutes",
    },
)
def main(ranks: Ranks, tutorial: bool) -> str | None:
    """Train, compare with one process and with DDP, and print one line."""
    if tutorial:
        return repeat_tutorial(ranks)
    whole = whole_batch_gradient(32 * ranks.world_size)
    mean = compare(ranks(lesson.mean_gradient), whole)
    prove("the mean of the shards' gradients is the batch's gradient", mean)
    by_hand, by_ddp = zip(*ranks(train_beside_ddp), strict=True)
    prove("average_gradients equals DDP", compare(list(by_hand), by_ddp[0]))
    same = compare(list(by_hand), by_hand[0], rtol=0, atol=0)
    prove("all replicas are equal to the last bit", same)
    return "replicas bit-equal, gradients equal one process"


from ddp_kit.lessons import partitioned_sgd as lesson
