"""Collectives: the reference answers, and a true sub-group."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons import collectives

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "02_collectives.ipynb"
FOLDED = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.DOTALL)


def test_the_reference_is_worked_out_by_hand():
    held = [torch.tensor([0.0, 1.0]), torch.tensor([10.0, 11.0])]
    after = {
        name: [None if want is None else want.tolist() for want in answer]
        for name in collectives.COLLECTIVES + collectives.ONE_TENSOR
        for answer in [collectives.reference(name, held)]
    }
    assert after == {
        "broadcast": [[0, 1], [0, 1]],
        "scatter": [[0], [1]],
        "gather": [[0, 10], None],
        "reduce": [[10, 12], None],
        "all_reduce": [[10, 12], [10, 12]],
        "all_gather": [[0, 10], [0, 10]],
        "reduce_scatter": [[10], [12]],
        "all_to_all": [[0, 10], [1, 11]],
        "all_reduce_in_a_group": [[1], [10]],
        "all_gather_one_tensor": [[0, 10], [0, 10]],
        "reduce_scatter_one_tensor": [[10], [12]],
        "all_to_all_one_tensor": [[0, 10], [1, 11]],
    }
    ops = {op: collectives.reference("all_reduce", held, op)[0].tolist() for op in collectives.OPS}
    assert ops == {
        "SUM": [10, 12],
        "PRODUCT": [0, 11],
        "MAX": [10, 11],
        "MIN": [0, 1],
        "AVG": [5, 6],
    }


def test_a_wrong_answer_does_not_agree():
    result = kit.run(collectives.all_reduce, "MAX", world_size=2)
    held = [collectives.own_tensor(rank, 2) for rank in range(2)]
    assert collectives.agrees(result, collectives.reference("all_reduce", held, "MAX"))
    assert not collectives.agrees(result, collectives.reference("all_reduce", held, "SUM"))


def test_rounding_agrees_but_a_difference_of_one_does_not():
    result = [{"after": torch.tensor([1e30, 3.0])}] * 4
    assert collectives.agrees(result, [torch.tensor([1e30, 3.0]) * (1 + 2**-22)] * 4)
    assert not collectives.agrees(result, [torch.tensor([1e30, 4.0])] * 4)
    assert not collectives.agrees(result, [torch.tensor([1e30])] * 4), "fewer numbers"
    result = [{"after": torch.tensor([10**18])}] * 4
    assert not collectives.agrees(result, [torch.tensor([10**18 + 1])] * 4)


def test_any_rank_can_be_the_root():
    held = [collectives.own_tensor(rank, 3) for rank in range(3)]
    for name in ("broadcast", "scatter", "gather", "reduce"):
        op = ["SUM"] if name == "reduce" else []
        result = kit.run(getattr(collectives, name), *op, 2, world_size=3)
        assert collectives.agrees(result, collectives.reference(name, held, root=2)), name


def test_the_table_in_the_notebook_has_the_first_arguments_of_every_collective():
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    rows = [line for cell in cells for line in cell["source"] if line.startswith("| `")]
    calls = [re.match(r"\| `(\w+)\((.*)\)` \|", row).groups() for row in rows]
    assert len(calls) == 9
    for name, arguments in calls:
        known = list(inspect.signature(getattr(dist, name)).parameters)
        given = [argument for argument in arguments.split(", ") if argument]
        assert (given, "async_op" in known) == (known[: len(given)], True), name


@pytest.mark.parametrize(("name", "world_size"), [("two_orders", 2), ("save", 4)])
def test_the_notebooks_answer_ends_without_an_error(name, world_size):
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    prose = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    [answer] = [code for code in FOLDED.findall(prose) if f"def {name}(" in code]
    names = {"torch": torch, "dist": dist, "kit": kit, "__name__": "notebook_02"}
    exec(answer, names)
    assert list(kit.run(names[name], world_size=world_size)) == [None] * world_size
