"""Wrong answers to the exercises of lesson 14, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text
from torch.distributed.tensor import DTensor, Replicate, Shard

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def norm(group="dp", square=True, root=True, in_place=False, whole=False):
    """Return an answer to 14.1; each argument can make it wrong in one way."""

    def answer(local, mesh):
        squares = local.square_() if in_place else local.square()
        total = squares.sum() if square else squares.sum().sqrt()
        if whole:
            parts = [torch.empty_like(local) for _ in range(mesh["dp"].size())]
            dist.all_gather(parts, local, group=mesh.get_group("dp"))
            total = torch.cat(parts).square().sum()
        elif group == "all":
            dist.all_reduce(total)
        elif group:
            dist.all_reduce(total, group=mesh.get_group(group))
        return total.sqrt() if root and square else total

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"group": None}, "That is the norm of this rank's rows."),
        ({"group": "all"}, "Every row is counted once for each of its replicas."),
        ({"group": "tp"}, 'Ranks with the same rows count once: add up over mesh.get_group("dp")'),
        ({"square": False}, "Norms do not add up. Add up the squares"),
        ({"root": False}, "That is the square of the norm: take the root."),
        ({"in_place": True}, "in local but holds [49, 64, 81, 100, 121, 144]\nLeave the tensor"),
        ({"whole": True}, "right, but 24 bytes were sent in collectives by rank 0 where 8 would"),
    ],
)
def test_a_norm_that_is(wrong, words):
    text = error_text(kit.check.exercise_14_1, norm(**wrong))
    assert text.startswith("exercise 14.1, norm(local, mesh of 2 x 2) on 4 ranks: ")
    assert words in text


def test_a_norm_is_right_by_hand_and_by_dtensor(capsys):
    def by_dtensor(local, mesh):
        tensor = DTensor.from_local(local, mesh, [Shard(0), Replicate()])
        return torch.linalg.vector_norm(tensor).full_tensor()

    for answer in (norm(), by_dtensor):
        kit.check.exercise_14_1(answer)
        assert capsys.readouterr().out.startswith("Exercise 14.1: right on meshes of 2 x 2, 2 x 1")


def gathering(steps=((1, "tp"), (0, "dp")), groups=None):
    """Return an answer to 14.2. steps: dimension and group of each all_gather."""

    def answer(local, mesh):
        for dim, name in steps:
            parts = [torch.empty_like(local) for _ in range(mesh[name].size())]
            dist.all_gather(parts, local.contiguous(), group=mesh.get_group(name))
            local = torch.cat(parts, dim)
        return local

    return answer


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([(0, "tp"), (1, "dp")], "The shape is right, but parts are in the wrong place."),
        ([(1, "tp")], 'The rows are not complete: gather along "dp" as well'),
        ([(0, "dp")], 'The columns are not complete: gather along "tp" as well'),
        ([], 'Gather along "tp", and concatenate the parts along dimension 1. Then'),
    ],
)
def test_a_whole_that_is(steps, words):
    text = error_text(kit.check.exercise_14_2, gathering(steps))
    assert text.startswith("exercise 14.2, gather_whole(local, mesh of 2 x 2) on 4 ranks: wrong")
    assert words in text


@pytest.mark.parametrize("reduce", [torch.sum, torch.flatten], ids=["scalar", "vector"])
def test_a_whole_that_is_not_a_matrix(reduce):
    text = error_text(kit.check.exercise_14_2, lambda local, mesh: reduce(local))
    assert "on 4 ranks: wrong result\nrank 0 should return [1, 2, 3, 4" in text
    assert 'Gather along "tp", and concatenate the parts along dimension 1. Then' in text


def test_a_whole_is_right_in_either_order_and_by_dtensor(capsys):
    def by_dtensor(local, mesh):
        return DTensor.from_local(local, mesh, [Shard(0), Shard(1)]).full_tensor()

    for answer in (gathering(), gathering([(0, "dp"), (1, "tp")]), by_dtensor):
        kit.check.exercise_14_2(answer)
        assert capsys.readouterr().out.startswith("Exercise 14.2: right on meshes of 2 x 2, 2 x 1")


def own_rows(x, w):
    parts = list((x @ w).chunk(dist.get_world_size()))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


def own_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def summed(tensor):
    dist.all_reduce(tensor)
    return tensor


def gathered(tensor, dim):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, dim)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x, w: x @ w, "That is this rank's summand, for all rows."),
        (lambda x, w: own_part(x @ w), "Those are this rank's rows of its own summand"),
        (lambda x, w: summed(x @ w), "That is the whole product on every rank."),
        (lambda x, w: x, "x @ w is a summand of the whole product. Cut it"),
        (
            lambda x, w: own_part(summed(x @ w)),
            "right, but 480 bytes were sent by rank 0 where 240 would be enough\nEvery rank needs",
        ),
        (
            lambda x, w: own_part(gathered(x, 1)) @ gathered(w, 0),
            "right, but 496 bytes were sent by rank 0 where 240 would be enough\n",
        ),
    ],
)
def test_rows_that_are(answer, words):
    text = error_text(kit.check.exercise_14_3, answer)
    assert text.startswith("exercise 14.3, own_rows(x, w) on 2 ranks: ")
    assert words in text
