"""Wrong answers to the exercises of lesson 08, and the errors that the learner gets."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from answers import error_text

import ddp_kit as kit
from ddp_kit.lessons import ring_allreduce


def reducing(starts="in the hook", waits="in finish", reset=True, divide=True, wide=False):
    """Return an answer to 8.1; each argument can make it wrong in one way."""

    def answer(buckets):
        counts, started = [0] * len(buckets), []

        def start(bucket):
            flat = torch.cat([parameter.grad.view(-1) for parameter in bucket])
            flat = flat.double() if wide else flat
            started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            if waits == "in the hook":
                started[-1][2].wait()

        def ready(number):
            counts[number] += 1
            if counts[number] == len(buckets[number]) and starts == "in the hook":
                counts[number] = 0 if reset else counts[number]
                start(buckets[number])

        def finish():
            for bucket in buckets if starts == "in finish" else []:
                start(bucket)
            for bucket, flat, work in started:
                if waits != "never":
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
            "in 0.weight.grad after backward 1 but holds [9, 9, 18, 18, 27, 27]\nThat is the sum.",
        ),
        ({"reset": False}, "Reset your counts for the next one."),
        (
            {"waits": "never"},
            "never waited for all_reduce, which may still be in flight; keep what",
        ),
        (
            {"wide": True},
            "right, but 320 bytes were sent in collectives by rank 0 where 160 would",
        ),
        ({"starts": "in finish"}, "right, but bucket 0 waited for the gradients of all buckets\n"),
        ({"waits": "in the hook"}, "right, but backward waited until bucket 0 was reduced\n"),
    ],
)
def test_buckets_that_are(wrong, words):
    text = error_text(kit.check.exercise_8_1, reducing(**wrong))
    assert text.startswith("exercise 8.1, average_in_backward(buckets) on 2 ranks: ")
    assert words in text


def test_buckets_that_go_round_as_messages():
    def average_in_backward(buckets):
        def finish():
            for parameter in chain(*buckets):
                ring_allreduce.chunked_ring(parameter.grad)
                parameter.grad /= dist.get_world_size()

        return finish

    text = error_text(kit.check.exercise_8_1, average_in_backward)
    assert (
        "on 2 ranks: right, but two backwards with 3 buckets made 0 collective calls\nCall all"
        in text
    )


def test_buckets_are_right_and_the_notebook_keeps_its_numbers_and_dtype(capsys):
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        kit.check.exercise_8_1(reducing())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out.startswith("Exercise 8.1: right on 1, 2, 3, 4 and 5 ranks")


def sampler(pad=True, repeat=True, uses_epoch=True, same_seed=True, offset=True, within=True):
    """Return an answer to 8.2; each argument can make it wrong in one way."""

    class OwnSampler:
        def __init__(self, data, seed=0):
            self.length, self.seed, self.epoch = len(data), seed, 0

        def set_epoch(self, epoch):
            self.epoch = epoch if uses_epoch else 0

        def __iter__(self):
            rank, n = dist.get_rank(), dist.get_world_size()
            seed = self.seed + self.epoch + (0 if same_seed else 100 * rank)
            generator = torch.Generator().manual_seed(seed)
            length = self.length if within else -(-self.length // n) * n
            order = torch.randperm(length, generator=generator).tolist()
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
        ({"uses_epoch": False}, "on 2 ranks: epochs 0 and 1 have the same order\nDraw the order"),
        ({"same_seed": False}, "on 2 ranks: no rank gets position "),
        ({"offset": False}, "on 2 ranks: no rank gets position "),
        ({"within": False}, "range(23), seed=7) on 2 ranks: there is no position 23\nrank 0 gets"),
    ],
)
def test_a_sampler_that_is(wrong, words):
    text = error_text(kit.check.exercise_8_2, sampler(**wrong))
    assert text.startswith("exercise 8.2, OwnSampler(range(")
    assert words in text


def test_a_sampler_that_shuffles_without_a_seed():
    class OwnSampler(sampler()):
        def __iter__(self):
            self.seed += 1
            return super().__iter__()

    text = error_text(kit.check.exercise_8_2, OwnSampler)
    assert "epoch 0 has a different order the second time\n" in text


def test_a_sampler_that_seeds_the_whole_process():
    class OwnSampler(sampler()):
        def __iter__(self):
            torch.manual_seed(self.seed + self.epoch)
            return super().__iter__()

    text = error_text(kit.check.exercise_8_2, OwnSampler)
    assert "on 2 ranks: it changed the random state of the whole process\nSeed a" in text


def test_positions_may_be_tensors(capsys):
    class OwnSampler(sampler()):
        def __iter__(self):
            return iter(torch.tensor(list(super().__iter__()), dtype=torch.int64))

    kit.check.exercise_8_2(OwnSampler)
    assert capsys.readouterr().out.startswith("Exercise 8.2: right on 1, 2, 3, 4 and 5 ranks")


def test_a_sampler_without_its_seed():
    class OwnSampler(sampler()):
        def __init__(self, data, seed=0):
            super().__init__(data)

    text = error_text(kit.check.exercise_8_2, OwnSampler)
    assert "on 2 ranks: seeds 7 and 1000 give the same order\nDraw the order" in text


def test_a_sampler_that_only_begins_elsewhere():
    class OwnSampler(sampler()):
        def __iter__(self):
            rank, n = dist.get_rank(), dist.get_world_size()
            order = [(i + self.seed + self.epoch) % self.length for i in range(self.length)]
            return iter((order * n)[: -(-self.length // n) * n][rank::n])

    text = error_text(kit.check.exercise_8_2, OwnSampler)
    assert "on 1 rank: epochs 0 and 1 have the same order, only starting at" in text
    assert "at a different position\nShuffle again" in text


def test_a_sampler_that_sends():
    class OwnSampler(sampler()):
        def __iter__(self):
            dist.barrier()
            return super().__iter__()

    text = error_text(kit.check.exercise_8_2, OwnSampler)
    assert "on 2 ranks: barrier was called\nA sampler needs no communication." in text
