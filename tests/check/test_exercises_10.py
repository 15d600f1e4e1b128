"""Wrong answers to the exercises of lesson 10, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake

import ddp_kit as kit


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
    ("wrong", "name", "fact"),
    [
        ({"both": "nccl"}, "device left out", "which serves no tensors on the CPU"),
        ({"cpu": "nccl"}, "device left out", "which serves no tensors on the CPU"),
        ({"gpu": "cpu:gloo"}, "device left out", "which serves no tensors on a GPU"),
        (
            {"shared": "cuda:gloo"},
            "device left out",
            "backend_for({'cpu', 'cuda'}, 2): it returns 'cuda:gloo', which",
        ),
        ({"cpu": "cpu:gloo,cuda:nccl"}, "nccl without GPUs", "which needs a GPU"),
        ({"gpu": "gloo"}, "gloo on own GPUs", "which sends tensors of GPUs by gloo"),
        ({"both": "gloo"}, "gloo on own GPUs", "which sends tensors of GPUs by gloo"),
        ({"both": "cpu:nccl,cuda:nccl"}, "nccl on the CPU", "tensors on the CPU to nccl"),
        ({"shared": "nccl"}, "nccl on shared GPUs", "but 2 ranks share a GPU"),
        ({"gpu": "NCLL"}, "no backend", "it returns 'NCLL', which PyTorch does not know"),
        ({"gpu": None}, "no backend", "it returns None, which is not a string"),
        ({"cpu": "mpi"}, "another backend", "it returns 'mpi', which names mpi"),
        ({"shared": "cpu:ucc,cuda:gloo"}, "another backend", "which names ucc"),
    ],
)
def test_a_backend_that_is(wrong, name, fact):
    assert_mistake(kit.check.exercise_10_2, choosing(**wrong), name, fact)


@pytest.mark.parametrize(
    "other", [{"gpu": "cpu:gloo,cuda:nccl"}, {"shared": "cpu:gloo,cuda:gloo"}, {"cpu": "cpu:gloo"}]
)
def test_a_backend_is_right_in_another_form(other, capsys):
    kit.check.exercise_10_2(choosing(**other))
    assert capsys.readouterr().out.startswith("Exercise 10.2: right for tensors on the CPU")


class Gathering:
    """An answer to 10.9 that gathers places as they are."""

    def __init__(self, k):
        self.k, self.left = k, None

    def __call__(self, tensor):
        flat, n = tensor.view(-1), dist.get_world_size()
        if self.left is not None:
            flat += self.left
        chosen = flat.abs().argsort(descending=True)[: self.k]
        self.left = flat.clone()
        self.left[chosen] = 0
        mean = torch.zeros_like(flat)
        numbers, places = torch.empty(n * self.k), torch.empty(n * self.k, dtype=torch.int64)
        dist.all_gather(list(numbers.split(self.k)), flat[chosen])
        dist.all_gather(list(places.split(self.k)), chosen)
        flat.copy_(mean.scatter_add(0, places, numbers) / n)


def test_the_largest_numbers_may_be_gathered_in_one_tensor(capsys):
    kit.check.exercise_10_9(Gathering)
    assert capsys.readouterr().out == "Exercise 10.9: right on 2 and 3 ranks.\n"


def test_the_largest_numbers_with_the_whole_tensor_behind_them():
    class Wasteful(Gathering):
        def __call__(self, tensor):
            super().__call__(tensor)
            dist.all_reduce(tensor.clone())

    assert_mistake(kit.check.exercise_10_9, Wasteful, "too many bytes", "are allowed")


def test_votes_may_be_counted_as_floats(capsys):
    def votes(yes):
        total = yes.float()
        dist.all_reduce(total)
        return total.bool(), total > dist.get_world_size() - 0.5, total

    kit.check.exercise_10_a(votes)
    assert capsys.readouterr().out == "Exercise 10.a: right on 2 and 3 ranks.\n"
