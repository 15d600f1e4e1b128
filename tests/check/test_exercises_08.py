"""Wrong answers to the exercises of lesson 08, and the errors that the learner gets."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from answers import error_text
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons import ddp, ring_allreduce


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
    ("wrong", "words"),
    [
        ({"silent": lambda number: False}, "right, but DDP called all_reduce 4 times where once"),
        ({"forward": False}, "right, but DDP called all_reduce 4 times where once would be enough"),
        ({"silent": lambda number: True}, "the last batch must not be under no_sync()."),
        ({"divide": False}, "That is the sum over the batches. Divide each loss by the number of"),
        ({"skip": (1,)}, "It is the mean over all batches of all ranks, of the gradient of model"),
    ],
)
def test_accumulated_gradients_that_are(wrong, words):
    text = error_text(kit.check.exercise_8_3, accumulating(**wrong))
    assert text.startswith("exercise 8.3, accumulate(model, batches) on ")
    assert words in text


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
    ("wrong", "words"),
    [
        ({"divide": False}, "rank 0 should hold [90, 90] in running_mean but holds [180, 180]\n"),
        ({"which": "parameters"}, "rank 0 should hold [90, 90] in running_mean but holds [60, 60]"),
    ],
)
def test_statistics_that_are(wrong, words):
    assert words in error_text(kit.check.exercise_8_4, averaging(**wrong))


def test_statistics_whose_count_is_summed():
    def average_statistics(model):
        averaging()(model)
        dist.all_reduce(model.module[0].num_batches_tracked)

    text = error_text(kit.check.exercise_8_4, average_statistics)
    assert "rank 0 should hold [3] in num_batches_tracked but holds [6]\n" in text
    assert text.endswith("skip it, it is the same on all ranks.")


def test_statistics_with_changed_weights():
    def average_statistics(model):
        averaging()(model)
        averaging("parameters", divide=False)(model)

    text = error_text(kit.check.exercise_8_4, average_statistics)
    assert "in weight but holds [2, 2]\nParameters are equal already." in text


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
    ("wrong", "words"),
    [
        (
            {"what": lambda model: model.state_dict()},
            "puts `module.` before each name. Save the state_dict of the network in it: model.mod",
        ),
        (
            {"what": lambda model: model.state_dict(), "strict": False},
            "rank 1 should hold [1, 2] in plain.weight but holds [0, 0]\nLoad the file into `pl",
        ),
        (
            {"wait": False},
            "\nThe other ranks may read only after rank 0 has written: call dist.bar",
        ),
        ({"wait": "only rank 0"}, "\nThe other ranks may read only after rank 0 has written: call"),
        ({"who": range(5)}, "on 2 ranks: right, but rank 1 saved as well\nOnly rank 0 saves."),
    ],
)
def test_a_checkpoint_that_is(wrong, words):
    text = error_text(kit.check.exercise_8_5, saving(**wrong))
    assert text.startswith("exercise 8.5, save_and_load(model, path, plain) on 2 ranks: ")
    assert words in text


def test_a_checkpoint_that_is_read_by_luck():
    def save_and_load(model, path, plain):
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), path)
        while True:
            with suppress(Exception):  # it is not whole yet
                plain.load_state_dict(torch.load(path))
                return
            time.sleep(0.05)

    text = error_text(kit.check.exercise_8_5, save_and_load)
    assert "right, but rank 1 did not wait for rank 0's file\nThe other ranks may read" in text


@pytest.mark.parametrize("wait", [False, "only rank 0"])
def test_a_checkpoint_that_a_late_rank_does_not_wait_for(wait):
    def save_and_load(model, path, plain):
        time.sleep(0.5 * dist.get_rank())
        saving(wait=wait)(model, path, plain)

    text = error_text(kit.check.exercise_8_5, save_and_load)
    assert "on 2 ranks: it raised an error\nThe other ranks may read only after rank 0" in text


def test_a_checkpoint_that_all_wait_for_before_it_is_written():
    def save_and_load(model, path, plain):
        dist.barrier()
        saving(wait=False)(model, path, plain)

    assert "The other ranks may read only after" in error_text(
        kit.check.exercise_8_5, save_and_load
    )


def test_a_checkpoint_for_which_only_the_others_wait():
    def save_and_load(model, path, plain):
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), path)
        else:
            dist.barrier()
        plain.load_state_dict(torch.load(path))

    text = error_text(kit.check.exercise_8_5, save_and_load)
    assert "on 2 ranks: it deadlocks\n" in text
    assert "\nAll ranks must call the barrier, also those that do not save.\n" in text


def test_a_checkpoint_that_is_repaired_when_it_is_read():
    def save_and_load(model, path, plain):
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)
        dist.barrier()
        loaded = torch.load(path)
        plain.load_state_dict({name.removeprefix("module."): t for name, t in loaded.items()})

    text = error_text(kit.check.exercise_8_5, save_and_load)
    assert "right, but the names in the file are module.weight\nA DistributedDataParallel" in text


def test_a_checkpoint_that_nobody_writes():
    def save_and_load(model, path, plain):
        plain.load_state_dict(model.module.state_dict())

    text = error_text(kit.check.exercise_8_5, save_and_load)
    assert "there is no file at `path`\nRank 0 saves: torch.save(..., path)." in text


def own_ddp(
    hooked=lambda module: [p for p in module.parameters() if p.requires_grad],
    broadcast=lambda module: (*module.parameters(), *module.buffers()),
    divide=True,
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
            if divide:
                parameter.grad /= dist.get_world_size()
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
    ("wrong", "words"),
    [
        ({"divide": False}, "\nThat is the sum. Divide it by the world size in place"),
        ({"waits": False}, "never waited for all_reduce, which may still be in flight; keep what"),
        (
            {"broadcast": lambda module: ()},
            "rank 1 should hold [1, 2, 3, 1] in first.weight after OwnDDP(module) but holds [2, 3",
        ),
        (
            {"broadcast": lambda module: module.parameters()},
            "rank 1 should hold [1, 1] in shift after OwnDDP(module) but holds [2, 2]\nAll ranks",
        ),
        (
            {"hooked": by_every_name},
            "two backwards called all_reduce 8 times for 3 gradients\nA weight that two layers",
        ),
        (
            {"hooked": lambda module: module.parameters()},
            "it raised an error\nA frozen parameter gets no gradient, and PyTorch refuses to set",
        ),
        (
            {"hooked": lambda module: [module.first.weight]},
            "in first.bias.grad after backward 1 but holds ",
        ),
        (
            {"overlap": False},
            "right, but backward 1 waited for an all_reduce\nCall all_reduce with",
        ),
    ],
)
def test_a_ddp_by_hand_that_is(wrong, words):
    text = error_text(kit.check.exercise_8_6, own_ddp(**wrong))
    assert text.startswith("exercise 8.6, OwnDDP(module) on 2 ranks: ")
    assert words in text


def test_a_ddp_by_hand_that_averages_after_backward():
    class OwnDDP(own_ddp(hooked=lambda module: ())):
        def finish_gradient_synchronization(self):
            for parameter in self.parameters():
                if parameter.grad is not None:
                    self.average(parameter)
            super().finish_gradient_synchronization()

    text = error_text(kit.check.exercise_8_6, OwnDDP)
    assert (
        "right, but no all_reduce of backward 1 began before the last gradient was ready\n" in text
    )


@pytest.mark.parametrize("answer", [own_ddp(), ddp.DistributedDataParallel])
def test_a_ddp_by_hand_is_right(answer, capsys):
    kit.check.exercise_8_6(answer)
    assert capsys.readouterr().out == (
        "Exercise 8.6: right on 1, 2, 3, 4 and 5 ranks, with tied and frozen weights, during "
        "backward.\n"
    )
