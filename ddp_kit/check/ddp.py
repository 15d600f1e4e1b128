"""Graders of lesson 08: buckets sent during backward, and a sampler of your own."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ddp_kit.check.grader import SIZES, Grader
from ddp_kit.check.partitioned_sgd import hint_for_mean, small_layers
from ddp_kit.error_text import count, name_ranks

BUCKETS = 3
SEEDS = (7, 1000)  # further apart than the epochs are
_ONCE = "Call all_reduce once per bucket in each backward, and do not convert the gradients."
_START = (
    "Call all_reduce with async_op=True in the hook, as soon as the bucket's last gradient is "
    "ready. Keep the Work object, and wait for it only in `finish`."
)


def exercise_8_1(average_in_backward: Callable[[list[list[nn.Parameter]]], Any]) -> None:
    """Grade `average_in_backward(buckets)` on 1 to 5 ranks, in two backwards of one model.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("8.1", "average_in_backward(buckets)", average_in_backward, collectives=True)
    numbers = sum(parameter.numel() for parameter in _model().parameters())
    for world_size in SIZES:
        result = grader.run(_backwards, world_size=world_size)
        for step in range(2):
            _check_gradients(grader, step)
        calls = grader.collectives()
        if len(calls) != 2 * BUCKETS and (calls or world_size > 1):
            grader.fail(
                f"right, but two backwards with {BUCKETS} buckets made "
                f"{count(len(calls), 'collective call')}",
                hint=_ONCE,
            )
        sent, needed = sum(event.nbytes for event in calls), 2 * 4 * numbers
        grader.check_at_most(" in collectives by rank 0", sent, needed, "byte", _ONCE)
        for step in range(2):
            for number, event in enumerate(calls[step * BUCKETS : (step + 1) * BUCKETS]):
                last_ready, done = result[0]["moments"][step]
                if number < BUCKETS - 1 and event.start > last_ready:
                    grader.fail(
                        f"right, but bucket {number} waited for the gradients of all buckets",
                        hint=_START,
                    )
                if event.waited is not None and event.waited < done:
                    grader.fail(
                        f"right, but backward waited until bucket {number} was reduced", hint=_START
                    )
    grader.passed("right on 1, 2, 3, 4 and 5 ranks, all buckets but the last leave during backward")


def exercise_8_2(own_sampler: Callable[[Sequence, int], Any]) -> None:
    """Grade the class `OwnSampler(data, seed)` on 1 to 5 ranks and several lengths.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("8.2", "OwnSampler(data, seed)", own_sampler, collectives=True)
    for world_size in SIZES:
        for length in (12, 10, 23, 2):
            case = f"OwnSampler(range({length}), seed={SEEDS[0]})"
            result = grader.run(_deal, length, world_size=world_size, case=case)
            if len(result.trace):
                grader.fail(
                    f"{result.trace.events[0].op} was called",
                    hint="A sampler needs no communication. All ranks draw the same order from the "
                    "same seed, and each takes its own part.",
                )
            _check_hands(grader, length)
            first, other, again, reseeded = (
                [dealt["hands"][i] for dealt in result] for i in range(4)
            )
            if length >= 10:  # fewer may be shuffled alike twice
                _check_shuffled(grader, "epochs 0 and 1 have", first, other)
                _check_shuffled(grader, "seeds {} and {} give".format(*SEEDS), first, reseeded)
            if any(dealt["seeded"] for dealt in result):
                grader.fail(
                    "it changed the random state of the whole process",
                    hint="Seed a torch.Generator of the sampler's own, and pass it to "
                    "torch.randperm.",
                )
            if first != again:
                grader.fail(
                    "epoch 0 has a different order the second time",
                    hint="The order must depend only on seed and epoch: create and seed a new "
                    "torch.Generator for each epoch.",
                )
    grader.passed("right on 1, 2, 3, 4 and 5 ranks, for 2, 10, 12 and 23 examples")


def _check_shuffled(grader: Grader, whose: str, hands: list[list], others: list[list]) -> None:
    """Fail if two orders are the same; on a single rank, also if one is only rotated."""
    if hands == others:
        grader.fail(
            f"{whose} the same order",
            hint="Draw the order from the seed plus the epoch given to set_epoch.",
        )
    order, other = hands[0], others[0]
    if len(hands) == 1 and any(order[i:] + order[:i] == other for i in range(len(order))):
        grader.fail(
            f"{whose} the same order, only starting at a different position",
            hint="Shuffle again: seed a torch.Generator with the seed plus the epoch, and pass it "
            "to torch.randperm.",
        )


def _check_hands(grader: Grader, length: int) -> None:
    """Fail unless all ranks get equally many positions, and each position goes to a rank."""
    result = grader.result
    each = -(-length // len(result))
    for epoch in range(2):
        hands = [dealt["hands"][epoch] for dealt in result]
        gets = [f"rank {rank} gets {hand}" for rank, hand in enumerate(hands)]
        if wrong := [rank for rank, hand in enumerate(hands) if len(hand) != each]:
            grader.fail(
                f"{name_ranks(wrong)} should get {count(each, 'position')}",
                *gets,
                hint="All ranks must get equally many, or one would wait in its last all_reduce. "
                "First extend the order from its beginning, as often as needed; then deal it out.",
            )
        if beyond := sorted(set(chain(*hands)) - set(range(length))):
            grader.fail(
                f"there is no position {beyond[0]}",
                *gets,
                hint=f"Shuffle the positions 0 to {length - 1}, then extend the order from its "
                "beginning.",
            )
        if missing := sorted(set(range(length)) - set(chain(*hands))):
            grader.fail(
                f"no rank gets position {missing[0]}",
                *gets,
                hint="Every position must go to a rank. All ranks must shuffle alike, so seed a "
                "torch.Generator; and no two may take the same part of the order.",
            )


def _check_gradients(grader: Grader, step: int) -> None:
    result = grader.result
    n = len(result)
    for number, name in enumerate(result[0]["names"]):
        own = [_own_gradients(rank, step)[number] for rank in range(n)]
        mean = sum(own[1:], own[0]) / n
        found = [value["gradients"][step][number] for value in result]
        grader.compare(
            [mean] * n,
            found,
            hint_for_mean(mean, found, own)
            if step == 0
            else "The first backward was right. Reset your counts for the next one.",
            place=f" in {name}.grad after backward {step + 1}",
        )


def _model() -> nn.Sequential:
    """Return three layers of whole numbers, so that gradients are exact."""
    layers = small_layers(2, 3, 2, 1)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 + 1)
    return layers


def _backward(layers: nn.Module, rank: int, step: int) -> None:
    layers.zero_grad()
    given = torch.full((1, 2), rank + 1 + 10 * step, dtype=torch.float32)
    layers(given).sum().backward()


def _own_gradients(rank: int, step: int) -> list[torch.Tensor]:
    layers = _model()
    _backward(layers, rank, step)
    return [parameter.grad for parameter in layers.parameters()]


def _backwards(rank: int, world_size: int, average_in_backward: Callable) -> dict:
    """Run backward twice; note when the last gradient was ready and when backward ended."""
    layers = _model()
    ready: list[int] = []
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic_ns()))
    finish = average_in_backward([list(layer.parameters()) for layer in reversed(layers)])
    gradients, moments = [], []
    for step in range(2):
        _backward(layers, rank, step)
        moments.append((ready[-1], time.monotonic_ns()))
        finish()
        gradients.append([parameter.grad.clone() for parameter in layers.parameters()])
    names = [name for name, _ in layers.named_parameters()]
    return {"names": names, "gradients": gradients, "moments": moments}


def _deal(rank: int, world_size: int, own_sampler: Callable, length: int) -> dict:
    """Deal four hands of positions, and check whether torch's global random state changed."""
    before = torch.get_rng_state()
    sampler, reseeded = (own_sampler(range(length), seed) for seed in SEEDS)
    hands = []
    for dealer, epoch in ((sampler, 0), (sampler, 1), (sampler, 0), (reseeded, 0)):
        dealer.set_epoch(epoch)
        hands.append([operator.index(position) for position in dealer])  # it may be a tensor
    return {"hands": hands, "seeded": not torch.equal(torch.get_rng_state(), before)}
