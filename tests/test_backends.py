"""Which backend and device a rank gets: with fake GPUs, and with real ones if there are any."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit import backends


@pytest.fixture
def gpus(monkeypatch):
    """Fake the GPUs; return the devices that were made current."""
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    yield made_current
    backends.take_device("gloo", 0)


@pytest.mark.parametrize(
    ("asked", "world_size", "chosen"),
    [
        ("auto", 1, "nccl"),
        ("auto", 2, "nccl"),
        ("auto", 3, "gloo"),
        ("nccl", 2, "nccl"),
        ("gloo", 2, "gloo"),
        ("cuda:gloo", 3, "cuda:gloo"),
    ],
)
def test_nccl_is_chosen_where_every_rank_has_a_gpu(gpus, asked, world_size, chosen):
    assert backends.choose_backend(asked, world_size) == chosen


def test_more_ranks_than_gpus_are_refused_with_the_choices(gpus):
    with pytest.raises(kit.BackendError) as caught:
        backends.choose_backend("nccl", 3)
    assert str(caught.value) == (
        'backend="nccl" needs one GPU for each of the 3 ranks, and this machine has 2; '
        'use backend="gloo", backend="cuda:gloo" on shared GPUs, or world_size=2'
    )


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("MPI", '; write "mpi"'),
        ("ucc", "; for another one, call init_process_group yourself in a WorkerPool(init=False)"),
        ("cpu:gloo,cuda:nccl", '; write "nccl", which includes gloo for tensors on the CPU'),
        ("smoke", ""),
        (None, ""),
    ],
    ids=str,
)
def test_an_unknown_backend_is_refused_with_a_hint(asked, hint):
    with pytest.raises(kit.BackendError) as caught:
        backends.choose_backend(asked, 2)
    names = '"auto", "gloo", "nccl", "cuda:gloo", "mpi", "shm"'
    assert str(caught.value) == f"backend must be one of {names}, got {asked!r}{hint}"


def test_a_gpu_without_nccl_is_left_to_gloo(gpus, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert backends.choose_backend("auto", 1) == "gloo"
    with pytest.raises(kit.BackendError, match="needs a PyTorch built for CUDA"):
        backends.choose_backend("nccl", 1)


def test_each_rank_gets_its_own_gpu_under_nccl_and_none_under_gloo(gpus):
    for rank in range(2):
        backends.take_device("nccl", rank)
        assert backends.device() == torch.device("cuda", rank)
    assert gpus == [torch.device("cuda", 0), torch.device("cuda", 1)]
    backends.take_device("gloo", 1)
    assert backends.device() == torch.device("cpu")
    assert len(gpus) == 2


def test_ranks_take_turns_on_gpus_that_gloo_shares(gpus):
    devices = [backends.take_device("cuda:gloo", rank) for rank in range(3)]
    assert devices == gpus == [torch.device("cuda", index) for index in (0, 1, 0)]


def test_gloo_on_gpus_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(kit.BackendError) as caught:
        backends.choose_backend("cuda:gloo", 2)
    assert str(caught.value) == (
        'backend="cuda:gloo" needs a GPU, and PyTorch sees none here; use backend="gloo"'
    )


def test_tensors_on_the_cpu_are_served_beside_nccl():
    assert backends.for_group("nccl") == "cpu:gloo,cuda:nccl"
    assert backends.for_group("cuda:gloo") == "cpu:gloo,cuda:gloo"
    assert backends.for_group("gloo") == "gloo"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_two_ranks_share_a_gpu_with_gloo():
    def worker(rank, world_size):
        tensor = torch.tensor([1.0 + rank], device=kit.device())
        dist.all_reduce(tensor)
        return tensor.device.type, tensor.item()

    assert list(kit.run(worker, world_size=2, backend="cuda:gloo")) == [("cuda", 3.0)] * 2
