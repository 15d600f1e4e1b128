"""Point-to-point: what a message holds, the races before wait(), and what notebook 01 claims."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from types import FunctionType

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons import point_to_point

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_point_to_point.ipynb"
FOLDED = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.DOTALL)


def sources(kind: str) -> list[str]:
    """Return the text of the cells of a kind."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def define(source: str) -> FunctionType:
    """Return the function that this code defines."""
    names = {"torch": torch, "dist": dist, "kit": kit, "__name__": "notebook_01"}
    exec(source, names)
    return next(value for value in names.values() if isinstance(value, FunctionType))


def folded(name: str) -> FunctionType:
    """Return a worker as a folded answer of the notebook gives it."""
    found = [code for code in FOLDED.findall("\n".join(sources("markdown"))) if name in code]
    return define(textwrap.dedent(found[0]))


def test_a_rank_that_is_both_neighbours_sends_twice():
    result = kit.run(point_to_point.exchange, world_size=2)
    assert list(result) == [[10, 10], [0, 0]]
    assert len(result.trace.messages()) == 4


def test_a_receive_from_anyone_takes_whoever_is_first():
    def worker(rank, world_size):
        tensor = torch.tensor([10 * rank])
        if rank == 1:  # rank 1 sends only when rank 2's message has been received
            dist.recv(tensor, src=2)
            tensor.fill_(10)
        if rank > 0:
            dist.send(tensor, dst=0)
            return dist.send(tensor, dst=1) if rank == 2 else None
        return [dist.recv(tensor) for _ in range(world_size - 1)]

    assert kit.run(worker, world_size=3)[0] == [2, 1]


def test_the_fix_that_the_notebook_gives_for_receiving_first():
    assert list(kit.run(folded("receive_first"), world_size=2)) == [10, 0]


def test_the_notebooks_answer_for_a_tensor_of_any_length():
    assert list(kit.run(folded("any_length"), world_size=2)) == [[0, 1, 2, 3, 4]] * 2


def immediate_with(*changes: tuple[str, str]) -> FunctionType:
    """Return the notebook's `immediate` with some lines changed."""
    (source,) = [source for source in sources("code") if "def immediate(" in source]
    source = source.partition("\n\n")[0]
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return define(source)


def test_the_notebooks_changes_to_immediate_end_or_hang_as_it_answers():
    swapped = "    receiving.wait()\n    sending.wait()"
    waits = immediate_with(("    sending.wait()\n    receiving.wait()", swapped))
    assert [value["after"].item() for value in kit.run(waits, world_size=3)] == [20, 0, 10]
    send, receive = "isend(tensor, dst=(rank + 1)", "irecv(received, src=(rank - 1)"
    calls = immediate_with((send, "HERE"), (receive, send), ("HERE", receive))
    assert [value["after"].item() for value in kit.run(calls, world_size=3)] == [20, 0, 10]
    early = immediate_with(
        ("    sending.wait()\n", ""),
        ("    receiving = ", "    sending.wait()\n    receiving = "),
    )
    with pytest.raises(kit.DeadlockError):
        kit.run(early, world_size=3)
