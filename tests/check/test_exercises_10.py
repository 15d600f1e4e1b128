"""Wrong answers to the exercises of lesson 10, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text

import ddp_kit as kit


def timing(together=True, op="MAX", warm_up=False, as_list=True):
    """Return an answer to 10.1; each argument can make it wrong in one way."""

    def answer(operation, clock, rounds):
        seconds = []
        for _ in range(1 + rounds):
            dist.barrier()
            start = clock()
            operation()
            seconds.append(clock() - start)
        slowest = torch.tensor(seconds if warm_up else seconds[1:])
        if together:
            dist.all_reduce(slowest, op=getattr(dist.ReduceOp, op))
        return slowest.tolist() if as_list else slowest

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"together": False}, "Each rank returns its own times."),
        ({"warm_up": True}, "The first round warms up. Leave it out."),
        ({"op": "SUM"}, "That is the sum over the ranks."),
        ({"op": "MIN"}, "Round i takes as long as its slowest rank;"),
        ({"as_list": False}, "a tensor has tolist()."),
    ],
)
def test_rounds_that_are(wrong, words):
    text = error_text(kit.check.exercise_10_1, timing(**wrong))
    assert text.startswith("exercise 10.1, slowest_rounds(operation, clock, rounds) on 2 ranks: ")
    assert words in text


def choosing(cpu="gloo", gpu="nccl", shared="gloo", both="cpu:gloo,cuda:nccl"):
    """Return an answer to 10.2; each argument can make it wrong in one way."""

    def answer(devices, ranks_per_gpu):
        if devices == {"cpu"}:
            return cpu
        if ranks_per_gpu > 1:
            return shared
        return both if "cpu" in devices else gpu

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"both": "nccl"}, "which serves no tensors on the CPU\nnccl alone is for GPUs."),
        ({"cpu": "nccl"}, "serves no tensors on the CPU"),
        ({"cpu": "cpu:gloo,cuda:nccl"}, "which needs a GPU\nAll tensors are on the CPU: gloo is"),
        ({"gpu": "gloo"}, "which sends tensors of GPUs by gloo\nIt works, but gloo copies them"),
        ({"gpu": "cpu:gloo"}, "which serves no tensors on a GPU"),
        ({"both": "gloo"}, "Each rank has its own GPU: use nccl."),
        ({"both": "cpu:nccl,cuda:nccl"}, "nccl moves tensors of GPUs only."),
        ({"shared": "nccl"}, "but 2 ranks share a GPU\nnccl refuses a GPU that another rank has."),
        ({"shared": "cuda:gloo"}, "({'cpu', 'cuda'}, 2) on 1 rank: it returns 'cuda:gloo', which"),
        ({"gpu": "NCLL"}, "it returns 'NCLL', which PyTorch does not know\nReturn a string"),
        ({"cpu": "mpi"}, "it returns 'mpi', which names mpi\nChoose gloo for the CPU, and nccl"),
        ({"shared": "cpu:ucc,cuda:gloo"}, "which names ucc"),
        ({"gpu": None}, "it returns None, which is not a string"),
    ],
)
def test_a_backend_that_is(wrong, words):
    text = error_text(kit.check.exercise_10_2, choosing(**wrong))
    assert text.startswith("exercise 10.2, backend_for(")
    assert words in text


@pytest.mark.parametrize(
    "other", [{"gpu": "cpu:gloo,cuda:nccl"}, {"shared": "cpu:gloo,cuda:gloo"}, {"cpu": "cpu:gloo"}]
)
def test_a_backend_is_right_in_another_form(other, capsys):
    kit.check.exercise_10_2(choosing(**other))
    assert capsys.readouterr().out.startswith("Exercise 10.2: right for tensors on the CPU")


def compressing(dtype=torch.bfloat16, back=True, divide=False, times=1):
    """Return an answer to 10.3; each argument can make it wrong in one way."""

    def answer(tensor):
        small = tensor.to(dtype) if dtype else tensor.clone()
        for _ in range(times - 1):
            dist.all_reduce(small.clone())
        dist.all_reduce(small)
        if divide:
            small /= dist.get_world_size()
        if back:
            tensor.copy_(small)

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dtype": None}, "right, but 32 bytes were sent in collectives by rank 0 where 16 would"),
        ({"times": 2}, "Send the tensor in bfloat16, which has two bytes for each number, and"),
        ({"dtype": torch.float16}, "float16 ends at 65,504. Use bfloat16"),
        ({"back": False}, "Every rank still holds what it started with. Change the tensor in"),
        ({"divide": True}, "That is the mean. Return the sum, as all_reduce does."),
    ],
)
def test_a_compressed_all_reduce_that_is(wrong, words):
    text = error_text(kit.check.exercise_10_3, compressing(**wrong))
    assert text.startswith("exercise 10.3, compressed_all_reduce(tensor) on 2 ranks: ")
    assert words in text


def test_a_compressed_all_reduce_that_changes_the_dtype():
    def compressed_all_reduce(tensor):
        tensor.data = tensor.to(torch.bfloat16)
        dist.all_reduce(tensor)

    text = error_text(kit.check.exercise_10_3, compressed_all_reduce)
    assert "(bfloat16 of shape (8,) instead of float32 of shape (8,))\n" in text
    assert "into the tensor, which stays float32." in text
