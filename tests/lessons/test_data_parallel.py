"""DataParallel: the eight steps, their numbers and their bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ddp_kit.lessons import data_parallel
from ddp_kit.lessons._digits import first_digits


@pytest.mark.parametrize(
    ("count", "sizes"), [(30, [8, 8, 8, 6]), (5, [2, 2, 1]), (6, [2, 2, 2]), (3, [1, 1, 1])]
)
def test_scatter_cuts_chunks_and_may_leave_a_device_without(count, sizes):
    batch = torch.arange(float(count))
    shards = data_parallel.scatter(batch, data_parallel.virtual(4))
    assert [len(shard) for shard in shards] == sizes
    assert torch.equal(torch.cat(shards), batch)
    assert shards[0].data_ptr() == batch.data_ptr()
    assert shards[1].untyped_storage().nbytes() == 4 * sizes[1]


def test_reduce_is_what_loss_backward_does_to_the_replicas():
    images, labels = first_digits(30)
    places = data_parallel.virtual(3)
    model, optimizer = data_parallel.start()
    steps = {
        step: new
        for step, _, new in data_parallel.eight_steps(model, optimizer, images, labels, places)
    }
    again, _ = data_parallel.start()
    shards = data_parallel.scatter(images, places)
    replicas = data_parallel.replicate(again, places)
    outputs = data_parallel.parallel_apply(again, replicas, shards)
    F.nll_loss(data_parallel.gather(outputs, places[0]), labels).backward()
    for index, parameter in enumerate(again.parameters()):
        assert torch.equal(steps["reduce"][0][index], parameter.grad)
        each = [gradients[index] for gradients in steps["backward"]]
        torch.testing.assert_close(sum(each), parameter.grad, atol=1e-7, rtol=0)
        assert each[1].abs().max() > 0


def test_replica_of_device_0_is_the_model_and_others_are_copies():
    model, _ = data_parallel.start()
    first, second = data_parallel.replicate(model, data_parallel.virtual(2))
    assert list(first) == list(second) == list(model.state_dict())
    for parameter, shared, copy in zip(
        model.parameters(), first.values(), second.values(), strict=True
    ):
        assert shared.data_ptr() == parameter.data_ptr() != copy.data_ptr()
        assert torch.equal(copy, parameter)


def test_replicas_have_buffers_that_are_not_saved():
    model = torch.nn.Linear(1, 1)
    model.register_buffer("scale", torch.ones(1), persistent=False)
    for replica in data_parallel.replicate(model, data_parallel.virtual(2)):
        assert list(replica) == ["weight", "bias", "scale"]


def test_buffers_remember_the_shard_of_device_0_only():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.tensor([[1.0], [3.0], [100.0], [200.0]])
    places = data_parallel.virtual(2)
    for _ in data_parallel.eight_steps(
        model, optimizer, batch, None, places, lambda output, _: output.mean()
    ):
        pass
    assert model[0].running_mean.item() == pytest.approx(0.1 * 2)
    assert model[0].num_batches_tracked.item() == 1
