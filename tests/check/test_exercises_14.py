"""Wrong answers to the exercises of lesson 14, and the errors that the learner gets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake
from torch.distributed.tensor import DTensor, Replicate, Shard

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.device_mesh import LAYOUTS
from ddp_kit.check.hints import solutions
from ddp_kit.lessons.device_mesh import bytes_sent

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
    ("wrong", "name", "fact"),
    [
        ({"group": None}, "nothing added up", "wrong result"),
        ({"group": "all"}, "replicas counted", "wrong result"),
        ({"group": "tp"}, "wrong group", "wrong result"),
        ({"square": False}, "norms added up", "wrong result"),
        ({"root": False}, "no root", "wrong result"),
        ({"in_place": True}, "changed in place", "in local but holds [49, 64, 81, 100, 121, 144]"),
        (
            {"whole": True},
            "rows gathered",
            "right, but 24 bytes were sent in collectives by rank 0",
        ),
    ],
)
def test_a_norm_that_is(wrong, name, fact):
    case = "exercise 14.1, norm(local, mesh of 2 x 2) on 4 ranks: "
    assert_mistake(kit.check.exercise_14_1, norm(**wrong), name, case, fact)


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
    ("answer", "name"),
    [
        (gathering([(0, "tp"), (1, "dp")]), "wrong place"),
        (gathering([(1, "tp")]), "rows left out"),
        (gathering([(0, "dp")]), "columns left out"),
        (gathering([]), "wrong shape"),
        (lambda local, mesh: local.sum(), "wrong shape"),
        (lambda local, mesh: local.flatten(), "wrong shape"),
    ],
)
def test_a_whole_that_is(answer, name):
    case = "exercise 14.2, gather_whole(local, mesh of 2 x 2) on 4 ranks: wrong result\n"
    fact = "rank 0 should return [1, 2, 3, 4"
    assert_mistake(kit.check.exercise_14_2, answer, name, case, fact)


def test_a_whole_is_right_in_either_order_and_by_dtensor(capsys):
    def by_dtensor(local, mesh):
        return DTensor.from_local(local, mesh, [Shard(0), Shard(1)]).full_tensor()

    for answer in (gathering(), gathering([(0, "dp"), (1, "tp")]), by_dtensor):
        kit.check.exercise_14_2(answer)
        assert capsys.readouterr().out.startswith("Exercise 14.2: right on meshes of 2 x 2, 2 x 1")


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
    ("answer", "name"),
    [
        (lambda x, w: x @ w, "own summand"),
        (lambda x, w: own_part(x @ w), "rows of own summand"),
        (lambda x, w: summed(x @ w), "whole product"),
        (lambda x, w: x, "otherwise"),
    ],
)
def test_rows_that_are(answer, name):
    fact = "exercise 14.3, own_rows(x, w) on 2 ranks: wrong result\n"
    assert_mistake(kit.check.exercise_14_3, answer, name, fact)


@mistake("14.3", "too many bytes", "rank 0 sent 480 bytes where 240 would be enough\n")
def test_rows_of_an_all_reduce(x, w):
    return own_part(summed(x @ w))


@mistake("14.3", "too many bytes", "rank 0 sent 496 bytes where 240 would be enough\n")
def test_rows_of_gathered_factors(x, w):
    return own_part(gathered(x, 1)) @ gathered(w, 0)


def always(*names):
    """Return an answer to 14.11 that uses these layouts in turn."""

    def choose_layouts(tokens, widths, n, most):
        return [names[layer % len(names)] for layer in range(len(widths) - 1)]

    return choose_layouts


def without_whole_weights(tokens, widths, n, most):
    """Return the best plan that shards every weight."""
    best = {Shard(0): (0, [])}
    for a, b in pairwise(widths):
        longer = {}
        for now, (sent, names) in best.items():
            for name, (x, kept, used, y) in LAYOUTS.items():
                more = sent + bytes_sent(now, x, (tokens, a), n, True)
                more += bytes_sent(kept, used, (a, b), n, True)
                if name != "rows" and more < longer.get(y, (more + 1,))[0]:
                    longer[y] = (more, [*names, name])
        best = longer
    ends = [
        (sent + bytes_sent(now, Shard(0), (tokens, widths[-1]), n, True), names)
        for now, (sent, names) in best.items()
    ]
    return min(ends)[1]


def test_a_plan_that_gathers_all_weights_reaches_the_first_goal(capsys):
    kit.check.exercise_14_11(always("gathered"))
    assert "Exercise 14.11: ★☆☆ 22.0692 MB" in capsys.readouterr().out


def test_the_best_plan_without_whole_weights_reaches_the_second_goal(capsys):
    kit.check.exercise_14_11(without_whole_weights)
    assert "Exercise 14.11: ★★☆ " in capsys.readouterr().out


def test_the_best_known_plan_reaches_all_goals(capsys):
    solution = defined("14.11", solutions()["14.11"]["program"], "choose_layouts")
    picture = kit.check.exercise_14_11(solution).picture
    assert "Exercise 14.11: ★★★ " in capsys.readouterr().out
    assert str(picture).count("3 columns 5 rows 6 gathered 8 columns") == 2


@pytest.mark.parametrize(
    ("answer", "name", "fact"),
    [
        (always("columns", "inner"), "no goal", "are the first goal"),
        (lambda tokens, widths, n, most: ["gathered"], "not a name for each layer", "11 names"),
        (always("column"), "unknown layout", "'column' is not one of the layouts"),
        (always("rows"), "too much kept", "a rank would keep 10,616,832 bytes"),
    ],
)
def test_wrong_plans_of_layouts(answer, name, fact):
    assert_mistake(kit.check.exercise_14_11, answer, name, fact)
