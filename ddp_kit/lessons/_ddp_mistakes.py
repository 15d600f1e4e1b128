"""The proof of the lesson on mistakes with DDP: what each does, beside what is right."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from itertools import chain
from statistics import mean

import torch

from ddp_kit import compare
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.ddp import count_calls, deal_by_hand


@lesson_main("ddp_mistakes")
def main(ranks: Ranks) -> str:
    """Make the mistakes, compare with what they should do, and print one line."""
    _prove_means(ranks)
    with redirect_stdout(io.StringIO()):  # the kit's note on what was never reduced
        _prove_replicas_drift(ranks)
    _prove_skipped_batches_and_seeds(ranks)
    _prove_unused_parameters_and_buffers(ranks)
    _prove_evaluation(ranks)
    return "8 mistakes do what the lesson says"


def _prove_means(ranks: Ranks) -> None:
    n = ranks.world_size
    shards = [[10.0 * rank] * (rank + 1) for rank in range(n)]
    weighted = compare(ranks(lesson.uneven_gradient, shards, True), -2 * mean(chain(*shards)))
    prove("weighted losses have the gradient of all examples", weighted)
    plain = compare(ranks(lesson.uneven_gradient, shards, False), -10.0 * (n - 1))
    prove("without weights, each rank counts as much as another", plain)
    whole = torch.tensor([[3 * (n - 1) / 2, 2.0]])
    late = compare(ranks(lesson.clipped, False), whole / whole.norm())
    prove("clipped once, the gradient is that of one process", late)
    early = compare(ranks(lesson.clipped, True), whole / whole.norm())
    prove("clipped in each micro-batch, it is another one", n == 1 or not early)


def _prove_replicas_drift(ranks: Ranks) -> None:
    n = ranks.world_size
    unwrapped = ranks(lesson.pull, True)
    reduced = count_calls(unwrapped.trace)["DDP all_reduce"]
    prove("the gradients of an unwrapped model are never reduced", reduced == 0)
    own = [10.0 * rank * (1 - 0.8**12) for rank in range(n)]
    drifted = compare([held[-1] for held in unwrapped], own)
    prove("each unwrapped replica goes to its own target", drifted)


def _prove_skipped_batches_and_seeds(ranks: Ranks) -> None:
    steps = list(ranks(lesson.skip_bad, True))
    prove("all ranks leave out the batch that is bad on one", steps == [2] * ranks.world_size)
    alike = list(ranks(lesson.masks, False))
    prove("with one seed, all ranks draw the same mask", alike == alike[:1] * len(alike))
    own = list(ranks(lesson.masks, True))
    prove("with a seed for each rank, they differ", all(own.count(mask) == 1 for mask in own))


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


def _prove_evaluation(ranks: Ranks) -> None:
    counted = [card < 5 for hand in deal_by_hand(10, ranks.world_size) for card in hand]
    padded = ranks(lesson.count_right, True)[0]
    prove("a sampler in evaluation counts some twice", padded == [sum(counted), len(counted)])
    prove("every n-th example counts once", ranks(lesson.count_right, False)[0] == [5, 10])


from ddp_kit.lessons import ddp_mistakes as lesson
