"""What gloo does wrongly without an error, or dies of: the kit raises instead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.trace.rank import gloo_limits

pytestmark = pytest.mark.usefixtures("forked_ranks")


def column(rank):
    return torch.zeros(4, 3)[:, 0]


def every_second_row(rank):
    return torch.zeros(8, 3)[::2]


def expanded(rank):
    return torch.zeros(1, 3).expand(4, 3)


def transposed(rank):
    return torch.zeros(3, 4).t()


def channels_last(rank):
    return torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)


def transposed_on_rank_0(rank):
    return torch.zeros(4, 3) if rank else transposed(rank)


def broadcast(tensor):
    dist.broadcast(tensor, 0)


def reduce(tensor):
    dist.reduce(tensor, 0)


def scatter(tensor):
    dist.scatter(tensor, None if dist.get_rank() else [tensor + 1, tensor + 1], 0)


def reduce_scatter(tensor):
    dist.reduce_scatter(tensor, [tensor + 1, tensor + 1])


def scatter_contiguous(tensor):
    pieces = [torch.zeros(tensor.shape), torch.ones(tensor.shape)]
    dist.scatter(tensor, None if dist.get_rank() else pieces, 0)


def all_to_all_contiguous(tensor):
    dist.all_to_all_single(tensor, torch.ones(tensor.shape))


IN_PLACE = [broadcast, dist.all_reduce, reduce]


def call_with(rank, world_size, call, make):
    tensor = make(rank)
    if 0 not in tensor.stride():
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
    call(tensor)
    return tensor.contiguous()


@pytest.mark.parametrize("call", [*IN_PLACE, scatter, reduce_scatter, all_to_all_contiguous])
@pytest.mark.parametrize("make", [column, every_second_row, expanded])
def test_a_tensor_with_gaps_in_memory_is_refused(call, make):
    with pytest.raises(kit.RankError, match="has gaps in memory") as caught:
        kit.run(call_with, call, make, world_size=2)
    tensor = make(0)
    strides = f"of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps"
    assert strides in str(caught.value)


@pytest.mark.parametrize("call", [scatter_contiguous, all_to_all_contiguous])
@pytest.mark.parametrize("make", [transposed, channels_last])
def test_tensors_of_one_call_in_different_memory_orders_are_refused(call, make):
    with pytest.raises(kit.RankError, match="those of the tensors in this call differ"):
        kit.run(call_with, call, make, world_size=2)


@pytest.mark.parametrize("call", [*IN_PLACE, reduce_scatter])
def test_memory_orders_that_differ_between_ranks_are_a_mismatch(call):
    with pytest.raises(kit.MismatchError) as caught:
        kit.run(call_with, call, transposed_on_rank_0, world_size=2)
    what = "with a tensor of strides (1, 4), rank 1 with a contiguous tensor."
    assert str(caught.value).startswith(f"rank 0 calls {call.__name__} {what}")
    assert "pass the .contiguous() of each tensor" in str(caught.value)


@pytest.mark.parametrize("make", [transposed, channels_last])
def test_equal_memory_orders_stay_right(make):
    tensor = make(0)
    numbers = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
    for call, wanted in (
        (broadcast, numbers),
        (dist.all_reduce, 2 * numbers),
        (scatter, numbers + 1),
        (reduce_scatter, 2 * numbers + 2),
    ):
        for value in kit.run(call_with, call, make, world_size=2):
            assert value.equal(wanted)


def gathers(rank, world_size):
    gaps = torch.arange(12.0).reshape(4, 3)[:, 0]
    pieces = [torch.zeros(4, 3)[:, 0] for _ in range(world_size)]
    dist.all_gather(pieces, gaps)
    summed = torch.zeros(2)
    dist.reduce_scatter(summed, [gaps[:2], gaps[2:]])
    one = torch.arange(12.0).reshape(4, 3)[:1, 0]  # a single number has no neighbours
    dist.all_reduce(one)
    return [piece.tolist() for piece in pieces], summed.tolist(), one.item()


def test_what_gloo_copies_stays_right():
    pieces = [[0, 3, 6, 9]] * 2
    assert list(kit.run(gathers, world_size=2)) == [(pieces, [0, 6], 0), (pieces, [12, 18], 0)]


def reduce_a_column(rank, world_size):
    matrix = torch.ones(4, 3)
    dist.all_reduce(matrix[:, 0])
    return matrix.tolist()


def test_other_backends_take_tensors_with_gaps():
    assert kit.run(reduce_a_column, world_size=2, backend="shm")[0] == [[2, 1, 1]] * 4


def test_tensors_on_a_gpu_are_refused_where_gloo_would_read_their_memory(monkeypatch):
    backends = "cpu:gloo,cuda:gloo"
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    for method, words in (
        ("send", "gloo cannot send a tensor that is on a GPU; use nccl"),
        ("recv_anysource", "gloo cannot receive a tensor"),
        ("all_gather_into_tensor", "gloo cannot do this all_gather with a tensor"),
    ):
        with pytest.raises(kit.BackendError, match=words):
            gloo_limits.refuse_on_gpus(None, method, [on_cpu, on_gpu])
        gloo_limits.refuse_on_gpus(None, method, [on_cpu])
    gloo_limits.refuse_on_gpus(None, "allreduce", [on_gpu])
    backends = "cpu:gloo,cuda:nccl"
    gloo_limits.refuse_on_gpus(None, "send", [on_gpu])
