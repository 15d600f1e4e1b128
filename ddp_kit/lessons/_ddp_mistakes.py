"""The proof of the lesson on mistakes with DDP: what each does, beside what is right."""

from __future__ import annotations

import inspect
import io
from contextlib import redirect_stdout
from itertools import chain
from statistics import mean

from torch.nn.parallel import DistributedDataParallel

from ddp_kit import compare
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.ddp import count_calls, deal_by_hand

# This argument was called broadcast_buffers until PyTorch 2.13.
_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in _ARGUMENTS)


@lesson_main("ddp_mistakes")
def main(ranks: Ranks) -> str:
    """Make the mistakes, compare with what they should do, and print one line."""
    _prove_means(ranks)
    with redirect_stdout(io.StringIO()):  # the kit's note on what was never reduced
        _prove_replicas_drift(ranks)
    _prove_unused_parameters_and_buffers(ranks)
    _prove_samplers(ranks)
    return "8 mistakes do what the lesson says"


def _prove_means(ranks: Ranks) -> None:
    n = ranks.world_size
    summed, averaged = ranks(lesson.pull, 0.4 / n, lesson.sum_gradients), ranks(lesson.pull, 0.4)
    prove("a sum is a mean with a learning rate n times as large", compare(summed, averaged))
    shards = [[10.0 * rank] * (rank + 1) for rank in range(n)]
    weighted = compare(ranks(lesson.uneven_gradient, shards, True), -2 * mean(chain(*shards)))
    prove("weighted losses have the gradient of all examples", weighted)
    plain = compare(ranks(lesson.uneven_gradient, shards, False), -10.0 * (n - 1))
    prove("without weights, each rank counts as much as another", plain)


def _prove_replicas_drift(ranks: Ranks) -> None:
    n = ranks.world_size
    unwrapped = ranks(lesson.pull, 0.1, None, True)
    reduced = count_calls(unwrapped.trace)["DDP all_reduce"]
    prove("the gradients of an unwrapped model are never reduced", reduced == 0)
    own = [10.0 * rank * (1 - 0.8**12) for rank in range(n)]
    drifted = compare([held[-1] for held in unwrapped], own)
    prove("each unwrapped replica goes to its own target", drifted)
    prove("a wrapper leaves the mean", list(ranks(lesson.gradient, True)) == [n - 1] * n)
    own = [2 * rank for rank in range(n)]
    prove("one that nobody keeps does not", list(ranks(lesson.gradient, False)) == own)


def _prove_unused_parameters_and_buffers(ranks: Ranks) -> None:
    n = ranks.world_size
    inputs = [10.0**rank for rank in range(n)]
    expected = {"trunk": sum(inputs) / n, "head 0": sum(inputs[::2]) / n}
    expected["head 1"] = sum(inputs[1::2]) / n if n > 1 else None
    heads = [rank % 2 for rank in range(n)]
    found = compare(ranks(lesson.use_heads, True, heads, 2), expected)
    prove("a rank that has not used a parameter counts as 0 in the mean", found)
    for sync in (True, False):
        seen = [list(map(int, means.values())) for means in ranks(lesson.running_means, sync)]
        own = [4 * (rank + 1) for rank in range(n)]
        starts = [own[0] if sync else mean for mean in own]
        ends = [start // 2 + mean for start, mean in zip(starts, own, strict=True)]
        expected = list(map(list, zip(own, starts, ends, strict=True)))
        prove("only rank 0's running mean is kept, or each rank's own", seen == expected)


def _prove_samplers(ranks: Ranks) -> None:
    first, *others = ranks(lesson.firsts, False)[0]
    prove("without set_epoch, all epochs are alike", others == [first, first])
    first, *others = ranks(lesson.firsts, True)[0]
    prove("with it, they differ", first not in others)
    counted = [card < 5 for hand in deal_by_hand(10, ranks.world_size) for card in hand]
    padded = ranks(lesson.count_right, True)[0]
    prove("a sampler in evaluation counts some twice", padded == [sum(counted), len(counted)])
    prove("every n-th example counts once", ranks(lesson.count_right, False)[0] == [5, 10])


from ddp_kit.lessons import ddp_mistakes as lesson
