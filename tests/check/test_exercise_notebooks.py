"""Exercises are gaps that are not written yet, and their solutions are right.

Their cells run here, in one process and on ranks that are forked: each stub must fail, and each
solution give its output. `make long` lets nbval run them in kernels.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import ddp_kit as kit
from ddp_kit.course.cells import GAP

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("exercises/[0-9]*.ipynb"))
MOST_MISSING = {"gap": 5, "estimate": 1, "function": 30, "record": 30}
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
        if graded := re.match(r"kit\.check\.exercise_(\d+)_(\w+)\(", "".join(cell["source"])):
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
    lessons = {path.name: cells(".", path.name) for path in sorted(FOLDER.glob("[0-9]*.ipynb"))}
    numbers = [
        number
        for name, lesson in lessons.items()
        for each in (lesson, cells("exercises", name) if name in NAMES else {})
        for number in checks(each)
    ]
    graders = [f"exercise_{number.replace('.', '_')}" for number in numbers]
    assert graders == [name for name in kit.check.__all__ if name.startswith("exercise_")]


def test_each_milestone_of_a_project_has_its_check_on_a_page():
    pages = sorted(FOLDER.glob("projects/[0-9]_*.ipynb"))
    graders = [name for name in kit.check.__all__ if name.startswith("project_")]
    assert [f"project_{page.stem[0]}" for page in pages] == graders
    for page, name in zip(pages, graders, strict=True):
        text = "".join("".join(cell["source"]) for cell in cells("projects", page.name).values())
        found = re.findall(rf"kit\.check\.{name}\(\w+, milestone=(\d)\)", text)
        parts = getattr(kit.check, name).exercise.parts
        assert found == [str(number) for number in range(1, len(parts) + 1)]
        assert page.with_suffix(".py").exists() or page.with_suffix("").is_dir()


def kind_of(number: str) -> str:
    return getattr(kit.check, f"exercise_{number.replace('.', '_')}").exercise.kind


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_five_gaps_at_most(name):
    numbers = list(checks(cells("exercises", name)))
    assert numbers == [f"{int(name[:2])}.{n}" for n in range(1, len(numbers) + 1)]
    numbers = [number for number in numbers if kind_of(number) == "gap"]
    link = f"(exercises/{name})"  # 09_ddp_mistakes has those of 08_ddp
    lessons = sum(link in path.read_text("utf-8") for path in FOLDER.glob("*.ipynb"))
    assert len(numbers) <= MOST_EXERCISES * lessons


@pytest.mark.parametrize("name", NAMES)
def test_a_gap_has_few_lines_and_its_check_below(name):
    found = []
    for cell in cells("solutions", name).values():
        for gap in GAP.finditer("".join(cell["source"])):
            task = gap[2].partition(":")[0]
            most = MOST_MISSING[kind_of(task.removeprefix("Exercise "))]
            lines = [line for line in gap[3].splitlines() if line.strip()]
            assert len(lines) <= most, task
            found.append(task)
    numbers = [number for number in checks(cells("exercises", name)) if kind_of(number) != "hunt"]
    assert found == [f"Exercise {number}" for number in numbers]


@pytest.mark.parametrize("name", NAMES)
def test_each_solution_is_right(name):
    for number, cell in checks(cells("solutions", name)).items():
        (output,) = [o for o in cell["outputs"] if o["output_type"] != "display_data"]
        right = "★★★" if kind_of(number) == "record" else "right"
        assert f"Exercise {number}: {right}" in "".join(output["text"])


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
@pytest.mark.parametrize("kind", [pytest.param("exercises", marks=pytest.mark.long), "solutions"])
@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_written_and_a_solution_does_what_is_saved(name, kind, capsys, tmp_path):
    names = {"__name__": "__main__"}
    graded = {cell["id"]: number for number, cell in checks(cells(kind, name)).items()}
    for cell in cells(kind, name).values():
        if cell["cell_type"] != "code":
            continue
        shown, raised = [], []
        try:
            shown = execute(cell, names, tmp_path)
        except Exception as error:
            raised = [(type(error).__name__, str(error))]
        printed = capsys.readouterr().out.replace(f" in {cell['id']}.py", "")  # a cell is no file
        found = printed, shown, raised
        if kind == "solutions":
            assert found == saved(cell), cell["id"]
        elif number := graded.get(cell["id"]):
            ((kind_of_error, text),) = raised
            wanted = (
                ("ExerciseError", f"exercise {number}, train(rank, world_size) on 2 ranks")
                if kind_of(number) == "hunt"
                else ("NotImplementedError", f"Exercise {number}")
            )
            assert (kind_of_error, text.partition(":")[0]) == wanted
