"""Wrong answers to the exercises of lesson 08, and the errors that the learner gets."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake, solved
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons import ddp


def test_positions_may_be_tensors(capsys):
    class OwnSampler(solved("8.2")):
        def __iter__(self):
            return iter(torch.tensor(list(super().__iter__()), dtype=torch.int64))

    kit.check.exercise_8_2(OwnSampler)
    assert capsys.readouterr().out.startswith("Exercise 8.2: right on 1, 2, 3, 4 and 5 ranks")


@pytest.mark.parametrize("waits", ["    pass", "        dist.barrier()"])  # or only rank 0
def test_a_checkpoint_that_a_late_rank_does_not_wait_for(waits):
    answer = solved("8.5", {"    dist.barrier()": waits})

    def save_and_load(model, path, plain):
        time.sleep(0.5 * dist.get_rank())
        answer(model, path, plain)

    fact = "on 2 ranks: it raised an error\n"
    assert_mistake(kit.check.exercise_8_5, save_and_load, "read too early", fact)


without_barrier = solved("8.5", {"dist.barrier()": "pass"})


@mistake("8.5", "read too early")
def test_a_checkpoint_that_all_wait_for_before_it_is_written(model, path, plain):
    dist.barrier()
    without_barrier(model, path, plain)


def test_gradients_of_which_the_forward_is_outside_of_no_sync():
    changes = {
        "        with nullcontext()": "        loss = model(x).mean()\n        with nullcontext()",
        "(model(x).mean() / len(batches))": "(loss / len(batches))",
    }
    assert_mistake(kit.check.exercise_8_3, solved("8.3", changes), "exchanged too often")


def test_an_order_of_numbers_that_travel_in_a_tensor(capsys):
    def order_of_gradients(module, loss):
        order = []
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        handles = [
            p.register_post_accumulate_grad_hook(partial(lambda n, _: order.append(n), number))
            for number, (_, p) in enumerate(trained)
        ]
        loss.backward()
        for handle in handles:
            handle.remove()
        numbers = torch.tensor(order)
        dist.broadcast(numbers, src=0)
        return [trained[number][0] for number in numbers]

    kit.check.exercise_8_1(order_of_gradients)
    assert capsys.readouterr().out == "Exercise 8.1: right on 2 and 3 ranks.\n"


def test_a_ddp_by_hand_may_count_and_copy_back(capsys):
    class OwnDDP(nn.Module):
        def __init__(self, module, cap):
            super().__init__()
            self.module, self.accumulating, self.works = module, False, []
            trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]
            counts = ddp.buckets_by_hand([4 * p.numel() for p in trained], cap, cap)
            rest = iter(trained)
            self.buckets = [[next(rest) for _ in range(count)] for count in counts]
            self.missing = [len(bucket) for bucket in self.buckets]
            for number, bucket in enumerate(self.buckets):
                for p in bucket:
                    p.register_post_accumulate_grad_hook(partial(self.count, number))

        def forward(self, *inputs):
            return self.module(*inputs)

        def count(self, number, _):
            if self.accumulating:
                return
            self.missing[number] -= 1
            while len(self.works) < len(self.buckets) and self.missing[len(self.works)] == 0:
                self.send()

        def send(self):
            bucket = self.buckets[len(self.works)]
            for p in bucket:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            flat = torch.cat([p.grad.view(-1) for p in bucket])
            self.works.append((flat, dist.all_reduce(flat, async_op=True)))

        def synchronize(self):
            while len(self.works) < len(self.buckets):
                self.send()
            for bucket, (flat, work) in zip(self.buckets, self.works, strict=True):
                work.wait()
                pieces = flat.split([p.numel() for p in bucket])
                for p, piece in zip(bucket, pieces, strict=True):
                    p.grad.copy_(piece.view_as(p) / dist.get_world_size())
            self.works = []
            self.missing = [len(bucket) for bucket in self.buckets]

    kit.check.exercise_8_6(OwnDDP)
    assert "Exercise 8.6: right on 2 and 3 ranks, while backward goes on." in (
        capsys.readouterr().out
    )


def by_cap(cap, first_cap):
    return lambda sizes, ready, cost: ddp.buckets_by_hand(sizes, cap, first_cap)


def all_that_is_ready(sizes, ready, cost):
    counts, done, free = [], 0, 0.0
    while done < len(sizes):
        start = max(free, ready[done])
        end = sum(moment <= start + 1e-9 for moment in ready)
        counts.append(end - done)
        free = start + cost(sum(sizes[done:end]))
        done = end
    return counts


def best_cut(sizes, ready, cost):
    return [1, 2, 2, 4, 7, 8]


MIB = 2**20


@pytest.mark.parametrize(
    ("answer", "stars", "score"),
    [
        (by_cap(25 * MIB, MIB), "★☆☆", "87.8"),
        (all_that_is_ready, "★★☆", "81.4"),
        (best_cut, "★★★", "78.7"),
    ],
)
def test_a_cut_has_its_stars(answer, stars, score, capsys):
    credit = kit.check.exercise_8_10(answer)
    said = f"Exercise 8.10: {stars} {score} ms; the best known answer has 78.7.\n"
    assert capsys.readouterr().out == said
    assert list(credit.parts.values()) == [star == "★" for star in stars]


@pytest.mark.parametrize(
    ("counts", "name", "fact"),
    [
        ([24], "no goal", "right, but 118.6 ms where at most 88 are the first goal"),
        ([1] * 24, "no goal", "right, but 129 ms where at most 88 are the first goal"),
        ([23], "other total", "the buckets hold 23 gradients in all, and there are 24"),
        ([23, 0, 1], "empty bucket", "bucket 1 is empty in [23, 0, 1]"),
        ([[0, 1], [2]], "no numbers", "should return a list of whole numbers, and returns [["),
        (None, "no numbers", "should return a list of whole numbers, and returns None"),
    ],
)
def test_a_cut_that_is(counts, name, fact):
    case = "exercise 8.10, cut_into_buckets(sizes, ready, cost) on 1 rank: "
    assert_mistake(kit.check.exercise_8_10, lambda sizes, ready, cost: counts, name, case, fact)
