"""Wrong answers to the exercises of lesson 08, and the errors that the learner gets."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons import ddp, ring_allreduce


def reducing(starts="in the hook", waits="in finish", reset=True, divide=1, wide=False, copy=True):
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
                for parameter, piece in zip(bucket if copy else [], pieces, strict=copy):
                    ranks = dist.get_world_size() ** divide
                    parameter.grad.copy_(piece.view_as(parameter) / ranks)
            started.clear()

        for number, bucket in enumerate(buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: ready(number))
        return finish

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        (
            {"divide": 0},
            "gradients not divided",
            "in 0.weight.grad after backward 1 but holds [9, 9, 18, 18, 27, 27]\n",
        ),
        (
            {"divide": 2},
            "gradients divided twice",
            "in 0.weight.grad after backward 1 but holds [2.25, 2.25, 4.5, 4.5, 6.75, 6.75]\n",
        ),
        (
            {"copy": False},
            "gradients unchanged",
            "in 0.weight.grad after backward 1 but holds [3, 3, 6, 6, 9, 9]\n",
        ),
        ({"reset": False}, "count not reset", " in 0.weight.grad after backward 2 but holds ["),
        ({"waits": "never"}, "", "never waited for all_reduce, which may still be in flight; keep"),
        (
            {"wide": True},
            "not once per bucket",
            "right, but 320 bytes were sent in collectives by rank 0 where 160 would",
        ),
        (
            {"starts": "in finish"},
            "starts late",
            "right, but bucket 0 waited for the gradients of all buckets\n",
        ),
        (
            {"waits": "in the hook"},
            "hook waits",
            "right, but backward waited until bucket 0 was reduced\n",
        ),
    ],
)
def test_buckets_that_are(wrong, name, fact):
    case = "exercise 8.1, average_in_backward(buckets) on 2 ranks: "
    assert_mistake(kit.check.exercise_8_1, reducing(**wrong), name, case, fact)


@mistake(
    "8.1",
    "not once per bucket",
    "on 2 ranks: right, but two backwards with 3 buckets made 0 collective calls\n",
)
def test_buckets_that_go_round_as_messages(buckets):
    def finish():
        for parameter in chain(*buckets):
            ring_allreduce.chunked_ring(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return finish


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


def own_ddp(
    hooked=lambda module: [p for p in module.parameters() if p.requires_grad],
    broadcast=lambda module: (*module.parameters(), *module.buffers()),
    divide=1,
    waits=True,
    overlap=True,
):
    """Return an answer to 8.6; each argument can make it wrong in one way."""

    class OwnDDP(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.works = module, []
            for tensor in broadcast(module):
                dist.broadcast(tensor.detach(), src=0)
            for parameter in hooked(module):
                parameter.register_post_accumulate_grad_hook(self.average)

        def average(self, parameter):
            parameter.grad /= dist.get_world_size() ** divide
            work = dist.all_reduce(parameter.grad, async_op=overlap)
            if overlap and waits:
                self.works.append(work)

        def forward(self, x):
            return self.module(x)

        def finish_gradient_synchronization(self):
            while self.works:
                self.works.pop().wait()

    return OwnDDP


def by_every_name(module):
    return [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"divide": 0}, "gradients not divided", "after backward 1 but holds "),
        ({"divide": 2}, "gradients divided twice", "after backward 1 but holds "),
        ({"waits": False}, "", "never waited for all_reduce, which may still be in flight; keep"),
        (
            {"broadcast": lambda module: ()},
            "not broadcast",
            "rank 1 should hold [1, 2, 3, 1] in first.weight after OwnDDP(module) but holds [2, 3",
        ),
        (
            {"broadcast": lambda module: module.parameters()},
            "not broadcast",
            "rank 1 should hold [1, 1] in shift after OwnDDP(module) but holds [2, 2]\n",
        ),
        (
            {"hooked": by_every_name},
            "tied weight twice",
            "two backwards called all_reduce 8 times for 3 gradients\n",
        ),
        ({"hooked": lambda module: module.parameters()}, "frozen hooked", "it raised an error\n"),
        (
            {"hooked": lambda module: [module.first.weight]},
            "gradients unchanged",
            "in first.bias.grad after backward 1 but holds ",
        ),
        (
            {"overlap": False},
            "hook waits",
            "right, but backward 1 waited for an all_reduce\n",
        ),
    ],
)
def test_a_ddp_by_hand_that_is(wrong, name, fact):
    case = "exercise 8.6, OwnDDP(module) on 2 ranks: "
    assert_mistake(kit.check.exercise_8_6, own_ddp(**wrong), name, case, fact)


def test_a_ddp_by_hand_that_averages_after_backward():
    class OwnDDP(own_ddp(hooked=lambda module: ())):
        def finish_gradient_synchronization(self):
            for parameter in self.parameters():
                if parameter.grad is not None:
                    self.average(parameter)
            super().finish_gradient_synchronization()

    fact = "right, but no all_reduce of backward 1 began before the last gradient was ready\n"
    assert_mistake(kit.check.exercise_8_6, OwnDDP, "starts late", fact)


@pytest.mark.parametrize("answer", [own_ddp(), ddp.DistributedDataParallel])
def test_a_ddp_by_hand_is_right(answer, capsys):
    kit.check.exercise_8_6(answer)
    assert capsys.readouterr().out == (
        "Exercise 8.6: right on 1, 2, 3, 4 and 5 ranks, with tied and frozen weights, during "
        "backward.\n"
    )
