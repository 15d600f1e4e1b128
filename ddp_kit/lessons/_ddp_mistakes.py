"""The proof of the lesson on mistakes with DDP: what each does, beside what is right."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import torch

from ddp_kit import compare
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.ddp import deal_by_hand


@lesson_main("ddp_mistakes")
def main(ranks: Ranks) -> str:
    """Make the mistakes, compare with what they should do, and print one line."""
    n = ranks.world_size
    shards = [[10.0 * rank] * (rank + 1) for rank in range(n)]
    plain = compare(ranks(lesson.uneven_gradient, shards, False), -10.0 * (n - 1))
    prove("without weights, each rank counts as much as another", plain)
    whole = torch.tensor([[3 * (n - 1) / 2, 2.0]])
    early = compare(ranks(lesson.clipped, True), whole / whole.norm())
    prove("clipped in each micro-batch, the gradient is another one", n == 1 or not early)
    with redirect_stdout(io.StringIO()):  # the kit's note on what was never reduced
        unwrapped = ranks(lesson.pull, True)
    own = [10.0 * rank * (1 - 0.8**12) for rank in range(n)]
    drifted = compare([held[-1] for held in unwrapped], own)
    prove("each unwrapped replica goes to its own target", drifted)
    steps = list(ranks(lesson.skip_bad, True))
    prove("all ranks leave out the batch that is bad on one", steps == [2] * n)
    alike = list(ranks(lesson.masks, False))
    prove("with one seed, all ranks draw the same mask", alike == alike[:1] * n)
    own = list(ranks(lesson.masks, True))
    prove("with a seed for each rank, they differ", all(own.count(mask) == 1 for mask in own))
    _prove_unused_parameters_and_buffers(ranks)
    counted = [card < 5 for hand in deal_by_hand(10, n) for card in hand]
    padded = ranks(lesson.count_right, True)[0]
    prove("a sampler in evaluation counts some twice", padded == [sum(counted), len(counted)])
    return "8 mistakes do what the lesson says"


def _prove_unused_parameters_and_buffers(ranks: Ranks) -> None:
    n = ranks.world_size
    inputs = [10.0**rank for rank in range(n)]
    expected = {"trunk.weight": sum(inputs) / n, "heads.0.weight": sum(inputs[::2]) / n}
    expected["heads.1.weight"] = sum(inputs[1::2]) / n if n > 1 else None
    heads = [rank % 2 for rank in range(n)]
    found = compare(ranks(lesson.use_heads, True, heads, 2), expected)
    prove("a rank that has not used a parameter counts as 0 in the mean", found)
    own = [8 * (rank + 1) for rank in range(n)]
    expected = [[mean / 2, (4 + mean) / 2] for mean in own]
    prove("only rank 0's running mean is kept", list(ranks(lesson.running_means)) == expected)


from ddp_kit.lessons import ddp_mistakes as lesson
