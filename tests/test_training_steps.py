"""Training steps are found in made traces of every kind, and in real runs."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from traces import MS, Script

import ddp_kit as kit
from ddp_kit.error_text import Frame
from ddp_kit.trace import Trace
from ddp_kit.trace.training_steps import BUCKET, training_steps

pytestmark = pytest.mark.usefixtures("forked_ranks")
LAYERS = (4096, 64, 4096, 64, 640, 40)  # bytes of gradients


def line(number):
    return Frame("Cell In[1]", number, "worker", f"line {number}", True)


def call(script, number, nbytes, op="all_reduce", **given):
    shape = ((nbytes // 4,),)
    script.collective(op, nbytes=nbytes, inputs=shape, where=line(number), **given)


def average(script, sizes=LAYERS):
    for nbytes in sizes:
        call(script, 5, nbytes)


def backward(script, sizes, number=9):
    """Reduce buckets as DDP does: it waits for the last one only."""
    *first, last = sizes
    for nbytes in first:
        for rank in range(script.n):
            script.add(
                rank,
                "DDP all_reduce",
                "collective",
                1,
                waited=None,
                nbytes=nbytes,
                inputs=((nbytes // 4,),),
                where=line(number),
            )
    call(script, number, last, "DDP all_reduce")


def counts(trace):
    """Return the number of calls in each step, which must be the same on all ranks."""
    found = training_steps(trace)
    assert list(found) == list(range(trace.world_size))
    sizes = [[len(step.events) for step in steps] for steps in found.values()]
    assert all(each == sizes[0] for each in sizes)
    return sizes[0]


# --- gradients averaged by hand ------------------------------------------------------------


def test_a_repeated_run_of_collectives_is_a_step():
    script = Script(3)
    call(script, 1, 99_000, "broadcast", root=0)
    for _ in range(20):
        average(script)
    call(script, 8, 4)
    trace = script.trace()
    assert counts(trace) == [6] * 20
    first = training_steps(trace)[1][0]
    assert [event.index for event in first.events] == [1, 2, 3, 4, 5, 6]
    assert {event.rank for event in first.events} == {first.rank} == {1}


def test_steps_follow_each_other_without_a_gap():
    script = Script(2)
    for _ in range(3):
        for rank in range(2):
            script.compute(rank, 5)
        average(script)
    trace = script.trace()
    steps = training_steps(trace)[0]
    assert steps[0].begin == trace.spans[0][0] == 4 * MS
    assert [step.begin for step in steps[1:]] == [step.end for step in steps[:-1]]
    assert steps[-1].end == trace.events[17].end


@pytest.mark.parametrize("every", [1, 7, 10, 20])
def test_the_loss_may_be_averaged_now_and_then(every):
    script = Script(2)
    for number in range(60):
        average(script)
        if number % every == every - 1:
            call(script, 8, 4)
    assert counts(script.trace()) == [7 if every == 1 else 6] * 60


def test_what_is_repeated_before_and_after_the_training_is_no_step():
    script = Script(2)
    for _ in range(30):
        call(script, 1, 0, "barrier")
    for _ in range(5):
        average(script)
    for _ in range(100):
        call(script, 9, 4)
    assert counts(script.trace()) == [6] * 5


def test_two_calls_alike_are_no_steps():
    script = Script(2)
    for _ in range(2):
        call(script, 1, 4)
    assert counts(script.trace()) == []


def test_nothing_is_found_where_nothing_repeats():
    assert counts(Trace(2)) == []
    script = Script(2)
    for size in range(1, 40):
        call(script, 1, 4 * size)
    assert counts(script.trace()) == []


def test_a_ring_of_messages_is_found():
    script = Script(3)
    for _ in range(4):
        for rank in range(3):
            script.send(rank, (rank + 1) % 3)
        for rank in range(3):
            script.recv((rank - 1) % 3, rank, 0.3)
        call(script, 3, 64)
    assert counts(script.trace()) == [3] * 4


def test_ranks_that_repeat_differently_often_have_no_steps():
    script = Script(3)
    for other, times in ((1, 4), (2, 6)):
        for _ in range(times):
            script.message(other, 0)
    assert counts(script.trace()) == []


def test_a_rank_that_calls_nothing_does_not_matter():
    script = Script(3)
    for _ in range(4):
        script.collective("all_reduce", ranks=(0, 1))
    found = training_steps(script.trace())
    assert [len(found[rank]) for rank in range(3)] == [4, 4, 0]


# --- DDP -----------------------------------------------------------------------------------


def ddp(steps, buffers=False, log=0):
    """Train as DDP does: it has one bucket in the first step, and then three."""
    script = Script(2)
    call(script, 7, 0, "DistributedDataParallel")
    call(script, 7, 9000, "DDP broadcast", root=0)
    for number in range(steps):
        if number == 1:
            call(script, 8, 0, "DDP forward")
        if buffers:
            call(script, 8, 128, "DDP broadcast", root=0)
        backward(script, (3000, 3000, 3000) if number else (9000,))
        if log and number % log == log - 1:
            call(script, 10, 4)
    return script


@pytest.mark.parametrize(
    ("options", "usual"), [({}, 3), ({"buffers": True}, 4), ({"log": 1}, 4), ({"log": 5}, 3)]
)
def test_the_first_step_of_ddp_counts_although_its_buckets_differ(options, usual):
    found = counts(ddp(20, **options).trace())
    assert found == [usual - 2] + [usual] * 19


def test_two_backwards_of_ddp_are_steps_and_one_is_not():
    assert counts(ddp(2).trace()) == [1, 3]
    assert counts(ddp(1).trace()) == []


def test_a_backward_that_was_not_completed_is_no_step():
    script = ddp(5)
    for rank in range(2):
        script.add(rank, "DDP all_reduce", "collective", None, nbytes=3000, where=line(9))
    assert counts(script.trace()) == [1, 3, 3, 3, 3]


def test_a_run_that_was_stopped_has_the_steps_that_all_ranks_have():
    script = ddp(5)
    for took in (0.1, 0.1, 0.1, None):
        for rank in (0,) if took else (0, 1):
            script.add(rank, "all_reduce", "collective", took, nbytes=400, where=line(20))
    ended = script.trace()
    assert counts(ended) == [1, 3, 3, 3, 3]
    shorter = tuple(e for e in ended if e.rank == 0 or e.index < 12 or e.end is None)
    assert counts(replace(ended, events=shorter)) == [1, 3, 3]


def test_of_a_trace_without_its_oldest_events_the_last_steps_are_left():
    trace = ddp(6).trace()
    kept = tuple(event for event in trace if event.index > (8 if event.rank else 5))
    assert counts(replace(trace, events=kept)) == []
    cut = replace(trace, events=kept, dropped=(6, 9))
    found = training_steps(cut)
    assert [len(steps) for steps in found.values()] == [3, 3]
    for steps in found.values():
        assert [step.events[0].index for step in steps] == [10, 13, 16]


# --- real runs -----------------------------------------------------------------------------


def train(rank, world_size, by_hand):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)
    )
    if not by_hand:
        model = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        if by_hand:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss.detach())


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_steps_of_a_real_training_are_found(by_hand):
    steps = training_steps(kit.run(train, by_hand, world_size=2).trace)
    assert [len(own) for own in steps.values()] == [5, 5]
    for own in steps.values():
        ops = [Counter(event.op for event in step.events) for step in own]
        if by_hand:
            assert ops == [{"all_reduce": 7}] * 5
        else:
            assert {each["all_reduce"] for each in ops} == {1}
            assert {each["DDP broadcast"] for each in ops} == {1}
            assert [each["DDP all_reduce"] for each in ops] == [1, 2, 2, 2, 2]
        for step in own:
            assert step.begin <= step.events[0].start < step.end


def train_with_a_slow_first_bucket(rank, world_size):
    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()

        def take(future):
            time.sleep(0.0 if bucket.is_last() else 0.3)
            return future.value()[0]

        return future.then(take)

    layers = [torch.nn.Linear(512, 512) for _ in range(2)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    model.register_comm_hook(None, hook)
    for _ in range(5):
        model(torch.ones(4, 512)).sum().backward()


def test_a_bucket_that_is_complete_after_the_last_one_does_not_end_a_step():
    trace = kit.run(train_with_a_slow_first_bucket, world_size=2).trace
    assert {rank: len(steps) for rank, steps in training_steps(trace).items()} == {0: 5, 1: 5}
    for rank in range(2):
        buckets = [e.waited is not None for e in trace if (e.rank, e.op) == (rank, BUCKET)]
        assert buckets == [True] + 4 * [False, True]
