"""Large and odd values: no copy through the pipe, and one sentence for one that cannot be sent."""

from __future__ import annotations

import gc
import io
import os
import threading
from contextlib import suppress

import numpy
import psutil
import pytest
import torch
from processes import wait_until

import ddp_kit as kit
from ddp_kit import settings
from ddp_kit.pool.wire import pickling


def test_a_large_tensor_comes_back_without_a_copy_through_the_pipe(monkeypatch):
    piped = []
    loads = pickling.pickle.loads
    monkeypatch.setattr(
        pickling.pickle,
        "loads",
        lambda data, **more: piped.append(len(data)) or loads(data, **more),
    )
    result = kit.run(lambda rank, world_size: torch.full((2_000_000,), rank + 1.0), world_size=2)
    assert [value.sum().item() for value in result] == [2e6, 4e6]
    assert len(piped) == 2
    assert max(piped) < 2_000  # bytes, of 8 MB


def test_descriptors_and_memory_of_large_values_are_given_back():
    def big(rank, world_size):
        return torch.ones(5_000_000)

    process = psutil.Process()
    kit.run(big, world_size=2)
    gc.collect()
    descriptors, memory = process.num_fds(), process.memory_info().rss
    for _ in range(10):
        kit.run(big, world_size=2)
    gc.collect()
    assert process.num_fds() <= descriptors
    assert process.memory_info().rss < memory + 60e6  # ten results are 400 MB
    ranks = [
        psutil.Process(r.process.pid) for r in kit.pool.pool._shared["spawn"]._processes.ranks[:2]
    ]
    assert all(rank.num_fds() < 50 for rank in ranks)


def test_each_receiver_may_change_its_own_copy():
    shared = torch.zeros(100_000)

    def change(rank, world_size, tensor):
        tensor += rank + 1
        return tensor

    result = kit.run(change, shared, world_size=2)
    assert [value[0].item() for value in result] == [1.0, 2.0]
    assert shared.sum() == 0
    result[0].zero_()
    assert result[1].sum() == 200_000


def test_every_kind_of_value_keeps_what_it_is():
    def make(rank, world_size):
        base = torch.arange(100_000.0)
        model = torch.nn.Linear(300, 300)
        model.weight.data.fill_(2)
        return {
            "views": (base, base[10:20], base.view(100, 1000).t()),
            "strided": base[::2],
            "half": base.to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "bool": torch.tensor([True, False]),
            "sparse": torch.eye(3).to_sparse(),
            "grad": torch.ones(70_000, requires_grad=True),
            "array": numpy.arange(100_000),
            "model": model,
            "bytes": io.BytesIO(b"abc"),
        }

    for value in kit.run(make, world_size=2):
        base, part, transposed = value["views"]
        assert part.tolist() == list(range(10, 20))
        assert value["bool"].resize_(3).shape == (3,)
        assert value["strided"][5] == 10
        part.zero_()
        assert base[10:20].sum() == 0, "a view is still a view"
        assert transposed.shape == (1000, 100)
        assert value["half"].dtype == torch.bfloat16
        assert value["empty"].shape == (0, 3)
        assert value["bool"][:2].tolist() == [True, False]
        assert value["sparse"].to_dense().equal(torch.eye(3))
        assert value["grad"].requires_grad
        value["grad"].sum().backward()
        assert value["array"].sum() == 4999950000
        value["array"][0] = 1
        assert value["model"](torch.ones(300)).shape == (300,)
        assert value["bytes"].getvalue() == b"abc"


def test_a_default_device_does_not_keep_values_from_being_sent():
    def worker(rank, world_size):
        ones = torch.ones(100_000)
        torch.set_default_device("meta")
        return ones, torch.tensor([rank], device="cpu")

    assert [value.item() for _, value in kit.run(worker, world_size=2)] == [0, 1]


def test_an_idle_rank_holds_nothing_of_its_last_value():
    """It has no unnamed file with values mapped or open."""

    def held():
        opened = f"/proc/{rank.pid}/fd"
        paths = [mapped.path for mapped in rank.memory_maps()]
        for number in os.listdir(opened):
            with suppress(FileNotFoundError):  # it was closed in between
                paths.append(os.readlink(os.path.join(opened, number)))
        return [path for path in paths if "ddp_kit values" in path]

    kit.run(lambda rank, world_size: torch.ones(5_000_000), world_size=1)
    rank = psutil.Process(kit.pool.pool._shared["spawn"]._processes.ranks[0].process.pid)
    wait_until(lambda: not held(), 100, "the rank releases it")


def test_many_values_can_be_kept():
    """A mapping keeps a descriptor; values that are not huge must do without."""
    list(kit.run(lambda r, w: r, world_size=2))  # the ranks themselves have some
    before = psutil.Process().num_fds()
    kept = [kit.run(lambda r, w: torch.ones(100_000), world_size=2) for _ in range(20)]
    assert psutil.Process().num_fds() <= before + 4
    assert all(value.sum() == 100_000 for result in kept for value in result)


def test_tensors_on_a_gpu_come_back_on_the_cpu_and_a_line_says_so_once(capsys):
    """A fake GPU: the rank reports that the value came from one."""

    def pretend(rank, world_size):
        from ddp_kit.pool.wire import pickling

        pickling._Pickler.from_gpu = True
        return torch.ones(3)

    with kit.WorkerPool(1) as pool:
        assert pool.run(pretend)[0].device.type == "cpu"
        printed = capsys.readouterr().out
        assert printed == "tensors returned from a GPU were copied to the CPU\n"
        pool.run(pretend)
        assert capsys.readouterr().out == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_tensors_on_a_real_gpu_come_back_on_the_cpu(pool, capsys):
    def make(rank, world_size):
        tensor = torch.arange(100_000, device="cuda")
        return tensor, tensor[5:7], torch.nn.Linear(2, 2).cuda()

    for base, part, model in pool.run(make, world_size=1):
        assert {base.device.type, part.device.type, model.weight.device.type} == {"cpu"}
        assert part.tolist() == [5, 6]
    assert "were copied to the CPU" in capsys.readouterr().out


class Stubborn:
    def __reduce__(self):
        raise RuntimeError("not me")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: (i for i in range(3)), "a generator, which"),
        (lambda: open(os.devnull), "a TextIOWrapper, which"),  # noqa: SIM115
        (lambda: {"a": [0, threading.Lock()]}, "a dict whose ['a'][1] is a lock, which"),
        (lambda: Stubborn(), "a Stubborn, which"),
    ],
    ids=["generator", "file", "lock_in_dict", "stubborn"],
)
def test_a_return_value_that_cannot_be_sent_is_named(make, kind):
    with pytest.raises(kit.RankError) as caught:
        kit.run(lambda rank, world_size: make() if rank == 1 else None, world_size=2)
    message = str(caught.value)
    start = f"rank 1 raised TypeError: the worker returned {kind} cannot be sent to"
    assert message.startswith(start)
    assert "return tensors, numbers, strings" in message
    assert "\n" not in message


def test_of_a_flood_of_prints_the_ends_are_kept_and_memory_stays_bounded():
    def flood(rank, world_size):
        print("the first line")
        for _ in range(200_000):
            print("x" * 99)
        print("the last line")

    before = psutil.Process().memory_info().rss
    output = kit.run(flood, world_size=2).output
    limit = settings.OUTPUT_KEPT
    for text in output:
        assert limit < len(text) < limit + 200
        assert text.startswith("the first line\n")
        assert text.endswith("x\nthe last line\n")
        dropped = 200_000 * 100 + len("the first line\nthe last line\n") - limit
        assert f"\n... {dropped:,} bytes left out: {limit:,} of a run are kept ...\n" in text
    assert psutil.Process().memory_info().rss < before + 40e6  # the flood was 40 MB
