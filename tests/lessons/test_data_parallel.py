"""DataParallel: the eight steps, their numbers and their bytes."""

from __future__ import annotations

import sys

import pytest
import torch

import ddp_kit as kit
from ddp_kit.lessons import _data_parallel_steps, data_parallel, partitioned_sgd

WORLD_SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("count", [30, 5, 6])
@pytest.mark.parametrize("devices", WORLD_SIZES)
def test_virtual_devices_train_as_one_process_does(devices, count):
    plain = data_parallel.train_plainly(count=count)
    parallel = data_parallel.train(data_parallel.virtual(devices), count=count)
    torch.testing.assert_close(parallel, plain, atol=1e-6, rtol=0)
    assert plain["gradient"].abs().max() > 1e-3


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
    images, labels = data_parallel.first_digits(30)
    places = data_parallel.virtual(3)
    model, optimizer = data_parallel.start()
    steps = {
        step: new
        for step, _, new in data_parallel.eight_steps(model, optimizer, images, labels, places)
    }
    again, _ = data_parallel.start()
    shards = data_parallel.scatter(images, places)
    outputs = data_parallel.parallel_apply(data_parallel.replicate(again, places), shards, places)
    data_parallel.LOSS(data_parallel.gather(outputs, places), labels).backward()
    for index, parameter in enumerate(again.parameters()):
        assert torch.equal(steps["reduce"][0][index], parameter.grad)
        each = [gradients[index] for gradients in steps["backward"]]
        torch.testing.assert_close(sum(each), parameter.grad, atol=1e-7, rtol=0)
        assert each[1].abs().max() > 0


def test_replica_of_device_0_is_the_model_and_others_are_copies():
    model, _ = data_parallel.start()
    first, second = data_parallel.replicate(model, data_parallel.virtual(2))
    for parameter, shared, copy in zip(
        model.parameters(), first.parameters, second.parameters, strict=True
    ):
        assert shared.data_ptr() == parameter.data_ptr() != copy.data_ptr()
        assert torch.equal(copy, parameter)


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


@pytest.mark.parametrize(("devices", "batch"), [(1, 30), (2, 30), (3, 30), (4, 30), (4, 5)])
def test_bytes_that_devices_hold_are_those_worked_out_by_hand(devices, batch):
    held = data_parallel.held_by_net(data_parallel.virtual(devices), batch)
    shards = [len(chunk) for chunk in torch.arange(batch).chunk(devices)]
    expected = bytes_by_hand(devices, batch)
    for step, here in held.items():
        kept = [device.pop("kept for backward") for device in here]
        working = step in ("parallel apply", "gather", "loss")
        # 49,480 bytes a digit: both convolutions, pools with their indices, relus.
        assert kept == [49_480 * shard * working for shard in shards] + [0] * (
            devices - len(shards)
        )
        nonzero = [{kind: n for kind, n in device.items() if n} for device in here]
        assert nonzero == expected[step], step


def bytes_by_hand(devices, batch):
    """What `held_by_net` must find: float32 has 4 bytes, a label 8; a digit has 784 numbers."""
    network = 4 * 21_840
    after = {}
    for step, number in zip(STEPS, range(1, 9), strict=True):
        after[step] = []
        sizes = [len(chunk) for chunk in torch.arange(batch).chunk(devices)]
        sizes += [0] * (devices - len(sizes))
        for device, size in enumerate(sizes):
            first, alone = device == 0, devices == 1
            gathered = 4 * 10 * batch if number >= 4 and not alone else 0
            held = {
                "parameters": network * first,
                "optimiser state": network * first,
                "batch": batch * (4 * 784 + 8) * first,
                "shard": 4 * 784 * size * (not first and number <= 5),
                "replica": network * (not first and size > 0 and 2 <= number <= 6),
                # the output of a single device is the gathered one, so it lives on
                "outputs": 4 * 10 * size * (3 <= number <= 5 or (alone and number >= 3)),
                "gathered, loss": (gathered + 4 * (number >= 5)) * first,
                "gradients": network * (number >= 6 and size > 0 and (first or number == 6)),
            }
            after[step].append({kind: n for kind, n in held.items() if n})
    return after


STEPS = (
    *("scatter", "replicate", "parallel apply", "gather"),
    *("loss", "backward", "reduce", "update"),
)


@pytest.mark.parametrize(("world_size", "count"), [(3, 30), (4, 30), (4, 5)])
def test_plain_mean_is_wrong_and_weighted_mean_right_for_unequal_shards(world_size, count):
    whole = data_parallel.train_plainly(1, count)["gradient"]
    mean = kit.run(data_parallel.rank_gradient, False, count, world_size=world_size)
    weighted = kit.run(data_parallel.rank_gradient, True, count, world_size=world_size)
    equal = count % world_size == 0
    for rank in range(world_size):
        torch.testing.assert_close(weighted[rank], whole, atol=1e-6, rtol=0)
        difference = (mean[rank] - whole).abs().max()
        assert difference < 1e-6 if equal else difference > 1e-3


def test_main_fails_when_outputs_are_gathered_in_another_order(monkeypatch):
    gather = data_parallel.gather
    monkeypatch.setattr(
        _data_parallel_steps, "gather", lambda outputs, at: gather(outputs[::-1], at)
    )
    with pytest.raises(kit.ProofError, match="the gradient of 2 devices and of one are the same"):
        data_parallel.main(["--world-size", "2"])


def test_every_step_is_timed_as_often_as_asked():
    one, two = data_parallel.step_seconds([data_parallel.virtual(n) for n in (1, 2)], rounds=2)
    assert tuple(one) == tuple(two) == STEPS
    for times in (*one.values(), *two.values()):
        assert len(times) == 2
        assert min(times) > 0


def test_real_replicas_are_called_and_read_as_the_stand_ins_are(monkeypatch):
    """PyTorch's own replicate on the CPU: only its copy between GPUs is replaced."""

    def broadcast(tensors, devices, detach=False):
        copies = [[tensor.clone() for tensor in tensors] for _ in devices[1:]]
        return [[tensor.view_as(tensor) for tensor in tensors], *copies]

    def apply(modules, inputs, devices):
        assert list(devices) == places
        return [module(shard) for module, shard in zip(modules, inputs, strict=True)]

    inner = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(inner, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(inner, "_get_device_index", lambda device, optional: device.index)
    real = torch.nn.parallel
    monkeypatch.setattr(real, "scatter", lambda batch, devices: batch.chunk(len(devices)))
    monkeypatch.setattr(real, "parallel_apply", apply)
    monkeypatch.setattr(real, "gather", lambda outputs, device: torch.cat(outputs))
    places = [torch.device("cpu", 0), torch.device("cpu", 1)]
    assert data_parallel.are_real(places)
    torch.testing.assert_close(
        data_parallel.train(places), data_parallel.train_plainly(), atol=1e-6, rtol=0
    )


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="torch.nn.parallel moves tensors between GPUs, and there are no two here",
)
def test_stand_ins_equal_the_real_functions_and_dataparallel():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for count in range(2, min(4, torch.cuda.device_count()) + 1):
            places = data_parallel.devices(count)
            assert data_parallel.are_real(places)
            real = data_parallel.train(places)
            stand_in = data_parallel.train(data_parallel.virtual(count))
            torch.testing.assert_close(real, stand_in, atol=1e-5, rtol=0)
            assert data_parallel.held_by_net(places) == data_parallel.held_by_net(
                data_parallel.virtual(count)
            )
            model, optimizer = data_parallel.start(places[0])
            first, _ = data_parallel.replicate(model, places[:2])
            assert first.parameters[0].data_ptr() == next(model.parameters()).data_ptr()
            whole = torch.nn.DataParallel(model, device_ids=places)
            for images, labels in data_parallel.batches(3):
                optimizer.zero_grad()
                output = whole(images.to(places[0]))
                data_parallel.LOSS(output, labels.to(places[0])).backward()
                optimizer.step()
            trained = partitioned_sgd.flat(model.parameters())
            torch.testing.assert_close(real["parameters"], trained, atol=1e-6, rtol=0)
