"""DDP: buckets, DDP by hand, an unused parameter, and the sampler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons import ddp
from ddp_kit.lessons.ddp_mistakes import Heads


def test_the_first_backward_has_one_bucket_and_later_ones_send_while_they_compute():
    first, second = kit.run(ddp.watch, 1, world_size=2)[1]
    assert first[-1].startswith("-> bucket 0: layer0.weight, layer0.bias, layer1.weight")
    assert sum(note.startswith("->") for note in first) == 1
    assert second == [
        note
        for bucket, layer in enumerate(["layer3", "layer2", "layer1", "layer0"])
        for bias, weight in [(f"{layer}.bias", f"{layer}.weight")]
        for note in (bias, weight, f"-> bucket {bucket}: {bias}, {weight}")
    ]


def test_the_typical_backward_is_not_the_first():
    result = kit.run(ddp.backwards, 1, 3, world_size=2)
    step = ddp.typical(result.trace)
    assert step in (1, 2)
    table = kit.plot.buckets(result, step=step).text_table
    assert f"Backward {step + 1} of 3" in table
    assert "bucket 3  1,050,624" in table


BY_HAND = [ddp.DistributedDataParallel, ddp.BucketedDistributedDataParallel]


def test_by_hand_a_gradient_is_sent_before_the_next_is_computed():
    def pending(rank, world_size):
        model = ddp.DistributedDataParallel(ddp.Stack().to(kit.device()))
        before = []
        for parameter in model.parameters():
            parameter.register_hook(lambda _: before.append(len(model.sending)))
        model(torch.ones(2, 512, device=kit.device())).sum().backward()
        model.finish_gradient_synchronization()
        return before

    assert list(kit.run(pending, world_size=2)) == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2


@pytest.mark.parametrize("wrap", BY_HAND)
def test_by_hand_a_second_backward_is_refused_while_gradients_travel(wrap):
    def twice(rank, world_size):
        model = wrap(nn.Linear(2, 2))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(kit.RankError) as caught:
        kit.run(twice, world_size=2)
    failure = caught.value.failures[0]
    assert (failure.type, failure.message) == (
        "RuntimeError",
        "gradients are still being averaged: call finish_gradient_synchronization() first",
    )


@pytest.mark.parametrize("wrap", BY_HAND)
def test_by_hand_an_unused_or_frozen_parameter_has_no_gradient_and_others_are_right(wrap):
    def gradients(rank, world_size):
        model = Heads()
        model.heads.append(nn.Linear(1, 1, bias=False).requires_grad_(False))
        wrapper, found = wrap(model), []
        for _ in range(2):
            model.zero_grad()
            wrapper(torch.full((1, 1), 10.0**rank), head=0).sum().backward()
            wrapper.finish_gradient_synchronization()
            grads = [parameter.grad for parameter in model.parameters()]
            found.append([None if grad is None else grad.item() for grad in grads])
        return found

    assert list(kit.run(gradients, world_size=2)) == [[[5.5, 5.5, None, None]] * 2] * 2


@pytest.mark.parametrize("cap", [0.5, None])
def test_by_hand_buckets_are_those_of_ddp_and_leave_while_the_backward_goes_on(cap):
    def send(rank, world_size):
        model = ddp.BucketedDistributedDataParallel(ddp.Stack().to(kit.device()), cap)
        started = []
        for parameter in model.parameters():
            parameter.register_hook(
                lambda _: started.append(sum(bucket.work is not None for bucket in model.buckets))
            )
        model(torch.ones(2, 512, device=kit.device())).sum().backward()
        lengths = [len(bucket.ready) for bucket in model.buckets]
        model.finish_gradient_synchronization()
        return started, lengths

    result = kit.run(send, world_size=2)
    started, lengths = result[0]
    notes = kit.run(ddp.watch, cap, world_size=2)[0][1]
    assert lengths == [note.count(", ") + 1 for note in notes if note.startswith("->")]
    assert ddp.count_calls(result.trace)["all_reduce"] == len(lengths)
    assert started == [number for number, length in enumerate(lengths) for _ in range(length)]


def test_only_all_reduces_of_hooks_overlap_with_the_backward():
    result = kit.run(ddp.two_backwards, world_size=2)
    reduced = [e for e in result.trace if e.rank == 0 and e.op == "all_reduce"]
    assert [event.blocking for event in reduced] == [True] * 4 + [False] * 4
    hooks = reduced[4:]  # the first wait begins after the last gradient has left
    assert max(e.start for e in hooks) <= min(e.waited for e in hooks)


@pytest.mark.parametrize("cap", [0.001, 1.5, 3.1, None])
def test_buckets_by_hand_are_those_of_ddp(cap):
    notes = kit.run(ddp.watch, cap, world_size=2)[0][1]
    counts = [note.count(", ") + 1 for note in notes if note.startswith("->")]
    sizes = [4 * 512, 4 * 512 * 512] * 4
    assert ddp.buckets_by_hand(sizes, (cap or 25) * 2**20, (cap or 1) * 2**20) == counts


def test_positions_are_dealt_as_worked_out_by_hand():
    assert ddp.deal_by_hand(10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert ddp.deal_by_hand(10, 4, drop_last=True) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ddp.deal_by_hand(2, 4) == [[0], [1], [0], [1]]
