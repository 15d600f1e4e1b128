"""Wrong answers to the exercises of lesson 08, and the errors that the learner gets."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons import ddp


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
    ("wrong", "name", "fact"),
    [
        (
            {"pad": False},
            "not filled up",
            "range(23), seed=7) on 2 ranks: rank 1 should get 12 positions\nrank 0 gets",
        ),
        (
            {"repeat": False},
            "not filled up",
            "range(2), seed=7) on 5 ranks: rank 4 should get 1 position\n",
        ),
        (
            {"uses_epoch": False},
            "same order",
            "on 2 ranks: epochs 0 and 1 have the same order\n",
        ),
        ({"same_seed": False}, "positions lost", "on 2 ranks: no rank gets position "),
        ({"offset": False}, "positions lost", "on 2 ranks: no rank gets position "),
        (
            {"within": False},
            "positions beyond",
            "range(23), seed=7) on 2 ranks: there is no position 23\nrank 0 gets",
        ),
    ],
)
def test_a_sampler_that_is(wrong, name, fact):
    case = "exercise 8.2, OwnSampler(range("
    assert_mistake(kit.check.exercise_8_2, sampler(**wrong), name, case, fact)


def test_a_sampler_that_shuffles_without_a_seed():
    class OwnSampler(sampler()):
        def __iter__(self):
            self.seed += 1
            return super().__iter__()

    fact = "epoch 0 has a different order the second time\n"
    assert_mistake(kit.check.exercise_8_2, OwnSampler, "generator goes on", fact)


def test_a_sampler_that_seeds_the_whole_process():
    class OwnSampler(sampler()):
        def __iter__(self):
            torch.manual_seed(self.seed + self.epoch)
            return super().__iter__()

    fact = "on 2 ranks: it changed the random state of the whole process\n"
    assert_mistake(kit.check.exercise_8_2, OwnSampler, "process seeded", fact)


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

    fact = "on 2 ranks: seeds 7 and 1000 give the same order\n"
    assert_mistake(kit.check.exercise_8_2, OwnSampler, "same order", fact)


def test_a_sampler_that_only_begins_elsewhere():
    class OwnSampler(sampler()):
        def __iter__(self):
            rank, n = dist.get_rank(), dist.get_world_size()
            order = [(i + self.seed + self.epoch) % self.length for i in range(self.length)]
            return iter((order * n)[: -(-self.length // n) * n][rank::n])

    fact = "on 1 rank: epochs 0 and 1 have the same order, only starting at a different position\n"
    assert_mistake(kit.check.exercise_8_2, OwnSampler, "only rotated", fact)


def test_a_sampler_that_sends():
    class OwnSampler(sampler()):
        def __iter__(self):
            dist.barrier()
            return super().__iter__()

    fact = "on 2 ranks: barrier was called\n"
    assert_mistake(kit.check.exercise_8_2, OwnSampler, "ranks communicate", fact)


def accumulating(silent=lambda number: number < 4, forward=True, divide=True, skip=()):
    """Return an answer to 8.3; each argument can make it wrong in one way."""

    def answer(model, batches):
        for number, x in enumerate(batches, 1):
            if number in skip:
                continue
            loss = None if forward else model(x).mean()
            with model.no_sync() if silent(number) else nullcontext():
                loss = model(x).mean() if forward else loss
                (loss / len(batches) if divide else loss).backward()

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        (
            {"silent": lambda number: False},
            "exchanged too often",
            "right, but DDP called all_reduce 4 times where once would be enough\n",
        ),
        (
            {"forward": False},
            "exchanged too often",
            "right, but DDP called all_reduce 4 times where once would be enough\n",
        ),
        ({"silent": lambda number: True}, "never exchanged", " in weight.grad but holds ["),
        ({"divide": False}, "not divided", " in weight.grad but holds ["),
        ({"skip": (1,)}, "other gradient", " in weight.grad but holds ["),
    ],
)
def test_accumulated_gradients_that_are(wrong, name, fact):
    case = "exercise 8.3, accumulate(model, batches) on "
    assert_mistake(kit.check.exercise_8_3, accumulating(**wrong), name, case, fact)


def averaging(which="buffers", divide=True):
    """Return an answer to 8.4; each argument can make it wrong in one way."""

    def answer(model):
        for tensor in getattr(model, which)():
            if tensor.is_floating_point():
                dist.all_reduce(tensor.data)
                if divide:
                    tensor.data.copy_(tensor.data / dist.get_world_size())

    return answer


@pytest.mark.parametrize(
    ("wrong", "fact"),
    [
        ({"divide": False}, "rank 0 should hold [90, 90] in running_mean but holds [180, 180]\n"),
        ({"which": "parameters"}, "rank 0 should hold [90, 90] in running_mean but holds [60, 60]"),
    ],
)
def test_statistics_that_are(wrong, fact):
    assert_mistake(kit.check.exercise_8_4, averaging(**wrong), "not averaged", fact)


@mistake("8.4", "counts summed", "rank 0 should hold [3] in num_batches_tracked but holds [6]\n")
def test_statistics_whose_count_is_summed(model):
    averaging()(model)
    dist.all_reduce(model.module[0].num_batches_tracked)


@mistake("8.4", "parameters changed", "in weight but holds [2, 2]\n")
def test_statistics_with_changed_weights(model):
    averaging()(model)
    averaging("parameters", divide=False)(model)


def saving(what=lambda model: model.module.state_dict(), who=(0,), wait=True, strict=True):
    """Return an answer to 8.5; each argument can make it wrong in one way."""

    def answer(model, path, plain):
        if dist.get_rank() in who:
            torch.save(what(model), path)
        if wait is True or (wait == "only rank 0" and dist.get_rank() == 0):
            dist.barrier()
        plain.load_state_dict(torch.load(path), strict=strict)

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"what": lambda model: model.state_dict()}, "wrapper saved", "it raised an error\n"),
        (
            {"what": lambda model: model.state_dict(), "strict": False},
            "not loaded",
            "rank 1 should hold [1, 2] in plain.weight but holds [0, 0]\n",
        ),
        ({"wait": False}, "read too early", "it raised an error\n"),
        ({"wait": "only rank 0"}, "read too early", "it raised an error\n"),
        ({"who": range(5)}, "all save", "on 2 ranks: right, but rank 1 saved as well\n"),
    ],
)
def test_a_checkpoint_that_is(wrong, name, fact):
    case = "exercise 8.5, save_and_load(model, path, plain) on 2 ranks: "
    assert_mistake(kit.check.exercise_8_5, saving(**wrong), name, case, fact)


@mistake("8.5", "read too early", "right, but rank 1 did not wait for rank 0's file\n")
def test_a_checkpoint_that_is_read_by_luck(model, path, plain):
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)
    while True:
        with suppress(Exception):  # it is not whole yet
            plain.load_state_dict(torch.load(path))
            return
        time.sleep(0.05)


@pytest.mark.parametrize("wait", [False, "only rank 0"])
def test_a_checkpoint_that_a_late_rank_does_not_wait_for(wait):
    def save_and_load(model, path, plain):
        time.sleep(0.5 * dist.get_rank())
        saving(wait=wait)(model, path, plain)

    fact = "on 2 ranks: it raised an error\n"
    assert_mistake(kit.check.exercise_8_5, save_and_load, "read too early", fact)


@mistake("8.5", "read too early")
def test_a_checkpoint_that_all_wait_for_before_it_is_written(model, path, plain):
    dist.barrier()
    saving(wait=False)(model, path, plain)


@mistake("8.5", "barrier on some", "on 2 ranks: it deadlocks\n")
def test_a_checkpoint_for_which_only_the_others_wait(model, path, plain):
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path)
    else:
        dist.barrier()
    plain.load_state_dict(torch.load(path))


@mistake("8.5", "wrapper saved", "right, but the names in the file are module.weight\n")
def test_a_checkpoint_that_is_repaired_when_it_is_read(model, path, plain):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    loaded = torch.load(path)
    plain.load_state_dict({name.removeprefix("module."): t for name, t in loaded.items()})


@mistake("8.5", "nobody saves", "there is no file at `path`\n")
def test_a_checkpoint_that_nobody_writes(model, path, plain):
    plain.load_state_dict(model.module.state_dict())


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
