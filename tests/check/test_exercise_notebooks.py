"""Exercises and solutions are the same notebooks, except for the lines that a learner writes.

Their cells run here, in one process and on ranks that are forked: each stub must fail as its output
says, and each solution pass. `make long` lets nbval run them in kernels.
"""

from __future__ import annotations

import ast
import json
import re
from difflib import SequenceMatcher
from pathlib import Path

import pytest

import ddp_kit as kit

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("exercises/[0-9]*.ipynb"))
MOST_MISSING = 5
MOST_EXERCISES = 5


def cells(kind: str, name: str) -> dict[str, dict]:
    notebook = json.loads((FOLDER / kind / name).read_text("utf-8"))
    return {cell["id"]: cell for cell in notebook["cells"]}


def lines(cell: dict) -> list[str]:
    return "".join(cell["source"]).splitlines()


def checks(cells: dict[str, dict]) -> dict[str, dict]:
    """Return the cells that grade, by the number of the exercise."""
    found = {}
    for cell in cells.values():
        if graded := re.match(r"kit\.check\.exercise_(\d+)_(\d+)\(", "".join(cell["source"])):
            found[".".join(graded.groups())] = cell
    return found


def test_every_exercise_has_a_solution_and_belongs_to_a_lesson():
    assert NAMES
    assert sorted(path.name for path in FOLDER.glob("solutions/[0-9]*.ipynb")) == NAMES
    for name in NAMES:
        assert (FOLDER / name).exists(), name
        lesson = "".join("".join(cell["source"]) for cell in cells(".", name).values())
        assert f"(exercises/{name})" in lesson


def test_every_grader_has_its_exercise():
    numbers = [number for name in NAMES for number in checks(cells("exercises", name))]
    graders = [f"exercise_{number.replace('.', '_')}" for number in numbers]
    assert graders == [name for name in kit.check.__all__ if name != "credit"]


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_five_exercises_at_most(name):
    numbers = list(checks(cells("exercises", name)))
    assert numbers == [f"{int(name[:2])}.{n}" for n in range(1, len(numbers) + 1)]
    link = f"(exercises/{name})"  # 09_ddp_mistakes has those of 08_ddp
    lessons = sum(link in path.read_text("utf-8") for path in FOLDER.glob("*.ipynb"))
    assert len(numbers) <= MOST_EXERCISES * lessons


@pytest.mark.parametrize("name", NAMES)
def test_stub_and_solution_differ_in_five_lines_at_most(name):
    exercises, solutions = cells("exercises", name), cells("solutions", name)
    shared = [cell_id for cell_id in solutions if cell_id in exercises]
    assert shared == list(exercises), "same cells in the same order"
    filled = 0
    for cell_id in shared[1:]:  # the first one says which of the two it is
        stub, solution = lines(exercises[cell_id]), lines(solutions[cell_id])
        changes = [
            change
            for change in SequenceMatcher(None, stub, solution, autojunk=False).get_opcodes()
            if change[0] != "equal"
        ]
        if not changes:
            continue
        filled += 1
        ((_, start, end, first, last),) = changes
        (missing,) = stub[start:end]
        assert re.fullmatch(r' *raise NotImplementedError\("Exercise \d+\.\d+: .+"\)', missing)
        assert 1 <= last - first <= MOST_MISSING
    assert filled == len(checks(exercises))


@pytest.mark.parametrize("name", NAMES)
def test_each_stub_says_that_it_is_not_written(name):
    stubs = cells("exercises", name)
    texts = ["".join(cell["source"]) for cell in stubs.values()]
    for number, cell in checks(stubs).items():
        (output,) = [o for o in cell["outputs"] if o["output_type"] != "display_data"]
        assert output["ename"] == "NotImplementedError"
        assert output["evalue"].startswith(f"Exercise {number}: ")
        assert output["traceback"] == [f"NotImplementedError: {output['evalue']}"]
        assert (
            sum(f'raise NotImplementedError("{output["evalue"]}")' in text for text in texts) == 1
        )


@pytest.mark.parametrize("name", NAMES)
def test_each_solution_is_right(name):
    for number, cell in checks(cells("solutions", name)).items():
        (output,) = [o for o in cell["outputs"] if o["output_type"] != "display_data"]
        assert "".join(output["text"]).startswith(f"Exercise {number}: right ")


def execute(cell: dict, names: dict, folder: Path) -> list[str]:
    """Run a cell; return the text of what it would show as its value, if it has one.

    folder: where the ranks find the lines of the cell.
    """
    source, file = "".join(cell["source"]), folder / f"{cell['id']}.py"
    file.write_text(source, "utf-8")
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), file, "exec"), names)
    if last is None:
        return []
    value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    shows_itself = hasattr(value, "_ipython_display_")  # a Credit shows nothing
    return [] if value is None or shows_itself else [repr(value)]


def saved(cell: dict) -> tuple[str, list[str], list[tuple[str, str]]]:
    """Return what a cell of a committed notebook has printed, shown and raised."""
    kinds = {kind: [] for kind in ("stream", "execute_result", "error", "display_data")}
    for output in cell["outputs"]:
        kinds[output["output_type"]].append(output)
    printed = "".join("".join(output["text"]) for output in kinds["stream"])
    shown = ["".join(output["data"]["text/plain"]) for output in kinds["execute_result"]]
    return printed, shown, [(output["ename"], output["evalue"]) for output in kinds["error"]]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("kind", ["exercises", "solutions"])
@pytest.mark.parametrize("name", NAMES)
def test_a_cell_does_something_else_than_is_saved(name, kind, capsys, tmp_path):
    names = {"__name__": "__main__"}
    for cell in cells(kind, name).values():
        if cell["cell_type"] != "code":
            continue
        shown, raised = [], []
        try:
            shown = execute(cell, names, tmp_path)
        except Exception as error:
            raised = [(type(error).__name__, str(error))]
        found = capsys.readouterr().out, shown, raised
        assert found == saved(cell), cell["id"]
