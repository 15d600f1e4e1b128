"""Wrong answers to the exercises of lesson 14, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
from answers import assert_mistake, solved
from torch.distributed.tensor import DTensor, Replicate, Shard

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_a_norm_and_a_whole_are_right_by_dtensor(capsys):
    def norm(local, mesh):
        tensor = DTensor.from_local(local, mesh, [Shard(0), Replicate()])
        return torch.linalg.vector_norm(tensor).full_tensor()

    def gather_whole(local, mesh):
        for name in ("dp", "tp"):
            local = DTensor.from_local(local, mesh[name], [Shard(0)]).full_tensor()
        return local

    for number, check, answer in (
        ("14.1", kit.check.exercise_14_1, norm),
        ("14.2", kit.check.exercise_14_2, gather_whole),
    ):
        check(answer)
        praise = f"Exercise {number}: right on meshes of 2 x 2, 2 x 1"
        assert capsys.readouterr().out.startswith(praise)


def always(*names):
    """Return an answer to 14.11 that uses these layouts in turn."""

    def choose_layouts(tokens, widths, n, most):
        return [names[layer % len(names)] for layer in range(len(widths) - 1)]

    return choose_layouts


WITHOUT_ROWS = {"if held + weight <= most:": 'if name != "rows" and held + weight <= most:'}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (always("gathered"), "★☆☆ 22.0692 MB"),
        (solved("14.11", WITHOUT_ROWS), "★★☆ "),
        (solved("14.11"), "★★★ "),
    ],
)
def test_a_plan_of_layouts_has_its_stars(answer, score, capsys):
    kit.check.exercise_14_11(answer)
    assert f"Exercise 14.11: {score}" in capsys.readouterr().out


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
