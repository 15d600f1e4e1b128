"""Wrong answers to the exercises of lesson 08, and what the learner is told."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import told

import ddp_kit as kit


def reducing(starts="in the hook", waits="in finish", anew=True, divide=True):
    """Return an answer to 8.1; each argument can make it wrong in one way."""

    def answer(buckets):
        counts, started = [0] * len(buckets), []

        def start(bucket):
            flat = torch.cat([parameter.grad.view(-1) for parameter in bucket])
            started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            if waits == "in the hook":
                started[-1][2].wait()

        def ready(number):
            counts[number] += 1
            if counts[number] == len(buckets[number]) and starts == "in the hook":
                counts[number] = 0 if anew else counts[number]
                start(buckets[number])

        def finish():
            for bucket in buckets if starts == "in finish" else []:
                start(bucket)
            for bucket, flat, work in started:
                work.wait()
                pieces = flat.split([parameter.numel() for parameter in bucket])
                for parameter, piece in zip(bucket, pieces, strict=True):
                    world_size = dist.get_world_size() if divide else 1
                    parameter.grad.copy_(piece.view_as(parameter) / world_size)
            started.clear()

        for number, bucket in enumerate(buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: ready(number))
        return finish

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"divide": False},
            "in 0.weight.grad after backward 1, and holds [9, 9, 18, 18, 27, 27]\nThat is the sum.",
        ),
        ({"anew": False}, "Begin to count anew for the next one."),
        ({"starts": "in finish"}, "right, but bucket 0 waited for the gradients of all buckets\n"),
        ({"waits": "in the hook"}, "right, but backward stood still until bucket 0 was reduced\n"),
    ],
)
def test_buckets_that_are(wrong, words):
    said = told(kit.check.exercise_8_1, reducing(**wrong))
    assert said.startswith("exercise 8.1, average_in_backward(buckets) on 2 ranks: ")
    assert words in said


def sampler(pad=True, repeat=True, told_epoch=True, same_seed=True, offset=True):
    """Return an answer to 8.2; each argument can make it wrong in one way."""

    class OwnSampler:
        def __init__(self, data, seed=0):
            self.length, self.seed, self.epoch = len(data), seed, 0

        def set_epoch(self, epoch):
            self.epoch = epoch if told_epoch else 0

        def __iter__(self):
            rank, n = dist.get_rank(), dist.get_world_size()
            seed = self.seed + self.epoch + (0 if same_seed else 100 * rank)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(self.length, generator=generator).tolist()
            if pad:
                order = (order * (n if repeat else 2))[: -(-self.length // n) * n]
            return iter(order[rank if offset else 0 :: n])

    return OwnSampler


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"pad": False},
            "range(23), seed=7) on 2 ranks: rank 1 should get 12 positions\nrank 0 gets",
        ),
        ({"repeat": False}, "range(2), seed=7) on 5 ranks: rank 4 should get 1 position\n"),
        ({"told_epoch": False}, "on 2 ranks: epochs 0 and 1 have the same order\nThe order comes"),
        ({"same_seed": False}, "on 2 ranks: nobody gets position "),
        ({"offset": False}, "on 2 ranks: nobody gets position "),
    ],
)
def test_a_sampler_that_is(wrong, words):
    said = told(kit.check.exercise_8_2, sampler(**wrong))
    assert said.startswith("exercise 8.2, OwnSampler(range(")
    assert words in said


def test_a_sampler_that_shuffles_without_a_seed():
    class OwnSampler(sampler()):
        def __iter__(self):
            self.seed += 1
            return super().__iter__()

    said = told(kit.check.exercise_8_2, OwnSampler)
    assert "epoch 0 has another order the second time\n" in said


def test_a_sampler_that_sends():
    class OwnSampler(sampler()):
        def __iter__(self):
            dist.barrier()
            return super().__iter__()

    said = told(kit.check.exercise_8_2, OwnSampler)
    assert "on 2 ranks: barrier was called\nA sampler sends nothing." in said
