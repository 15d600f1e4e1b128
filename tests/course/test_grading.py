"""Exercises in the formats of nbgrader and Otter-Grader, and the points that these tools give."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from grading_tools import NOTEBOOKS, TOOLS, exercises_of, nbgrader, otter, sources
from half_right import ANSWERS, changed

import ddp_kit as kit
from ddp_kit.course.__main__ import main

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("exercises/[0-9]*.ipynb"))
GRADERS = [name for name in kit.check.__all__ if re.fullmatch(r"exercise_\d+_\d+", name)]
needs_tools = pytest.mark.skipif(
    not (TOOLS / "bin" / "nbgrader").exists(), reason="the grading tools are not installed"
)
STUCK = "def {name}(*arguments):\n    dist.recv(torch.zeros(1), 1 - dist.get_rank())\n"
CRASHED = "def {name}(*arguments):\n    __import__('os')._exit(1)\n"


def points(exercise: str) -> int:
    return len(getattr(kit.check, exercise).exercise.parts)


def right(exercise: str, solution: str) -> str:
    return solution


def half(exercise: str, solution: str) -> str:
    return changed(exercise, solution) if exercise in ANSWERS else ""


def stub(exercise: str, solution: str) -> str:
    return ""


def wanted(exercises: list[str]) -> dict[str, dict[str, tuple[float, float]]]:
    full = {exercise: points(exercise) for exercise in exercises}
    some = {exercise: ANSWERS[exercise][2] if exercise in ANSWERS else 0 for exercise in exercises}
    return {
        "right": {exercise: (most, most) for exercise, most in full.items()},
        "half": {exercise: (some[exercise], most) for exercise, most in full.items()},
        "stub": {exercise: (0, most) for exercise, most in full.items()},
    }


def rounded(found: dict) -> dict:
    return {
        student: {exercise: (round(n, 6), most) for exercise, (n, most) in scores.items()}
        for student, scores in found.items()
    }


@pytest.fixture
def two_exercises(tmp_path):
    """A course of one notebook, with the exercises 2.1 and 2.2 only."""
    course = tmp_path / "course"
    for kind in ("exercises", "solutions"):
        notebook = json.loads((NOTEBOOKS / kind / "02_collectives.ipynb").read_text("utf-8"))
        kept = ("title", "imports", "2-1", "2-2")
        cells = [cell for cell in notebook["cells"] if cell["id"].endswith(kept)]
        (course / kind).mkdir(parents=True)
        text = json.dumps(notebook | {"cells": cells})
        (course / kind / "02_collectives.ipynb").write_text(text, "utf-8")
    return course


@needs_tools
@pytest.mark.parametrize("tool", [nbgrader, pytest.param(otter, marks=pytest.mark.long)])
def test_a_tool_gives_the_points_of_the_parts_that_hold(tool, two_exercises, tmp_path):
    def stuck(exercise: str, solution: str) -> str:
        return STUCK.format(name="broadcast") if exercise == "exercise_2_1" else solution

    students = {"half": half, "stuck": stuck}
    found = tool(tmp_path / "graded", "02_collectives", students, two_exercises)
    some = wanted(["exercise_2_1", "exercise_2_2"])["half"]
    only = {"exercise_2_1": (0, 3), "exercise_2_2": (4, 4)}
    assert rounded(found) == {"half": some, "stuck": only}


@needs_tools
@pytest.mark.long
@pytest.mark.parametrize("tool", [nbgrader, otter])
@pytest.mark.parametrize("name", NAMES)
def test_a_tool_gives_these_points_in_the_whole_course(name, tool, tmp_path):
    course = tmp_path / "course"
    for kind in ("exercises", "solutions"):
        (course / kind).mkdir(parents=True)
        shutil.copy(NOTEBOOKS / kind / f"{name}.ipynb", course / kind)
    exercises = list(dict.fromkeys(exercises_of(name).values()))
    crash = exercises[0]

    def crashing(exercise: str, solution: str) -> str:
        if exercise != crash:
            return solution
        defined = solution.replace("class ", "def ").split("def ")[1].split("(")[0].split(":")[0]
        return solution + "\n\n" + CRASHED.format(name=defined)

    students = {"right": right, "half": half, "stub": stub, "crash": crashing}
    found = rounded(tool(tmp_path / "graded", name, students, course))
    print(name, tool.__name__, json.dumps(found))
    expected = wanted(exercises)
    expected["crash"] = expected["right"] | {crash: (0, points(crash))}
    assert found == expected


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    assert [main([tool, str(folder / tool)]) for tool in ("nbgrader", "otter")] == [0, 0]
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_release_of_nbgrader_has_every_test_and_no_solution(name, converted):
    path = converted / "nbgrader" / "source" / name / f"{name}.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"]
    known = [(c["metadata"].get("nbgrader", {}), "".join(c["source"])) for c in cells]
    tests = [its for its, _ in known if its.get("grade")]
    gaps = [source for its, source in known if its.get("solution")]
    broken = [source for its, source in known if not its]  # programs of hunts, to be edited
    exercises = list(dict.fromkeys(exercises_of(name).values()))
    assert [test["points"] for test in tests] == [points(exercise) for exercise in exercises]
    assert all(test["locked"] for test in tests)
    solutions = sources("solutions", name).values()
    for gap in gaps:
        assert gap.count("### BEGIN SOLUTION\n") == gap.count("### END SOLUTION") == 1
        assert gap in solutions
    assert all(program.startswith("# Hunt ") for program in broken)
    assert len(gaps) + len(broken) == len(exercises)
    assert "solutions/" not in json.dumps(cells)
    assert not any(cell.get("outputs") for cell in cells)


def test_otters_tests_are_those_of_the_exercises(converted):
    files = sorted(path.stem for path in (converted / "otter").glob("*/tests/*.py"))
    assert files == sorted(GRADERS)
    for path in (converted / "otter").glob("*/tests/*.py"):
        text = path.read_text("utf-8")
        compile(text, str(path), "exec")
        assert text.count("points=1)") == points(path.stem)
        assert "OK_FORMAT = False" in text


def refused(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 1
    out, error = capsys.readouterr()
    assert out == ""
    return error.removesuffix("\n")


def test_a_folder_with_files_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("kept")
    error = refused(capsys, "nbgrader", str(tmp_path))
    assert error == f"{tmp_path} exists and is not an empty folder; name a new one"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_is_not_a_course_is_refused(tmp_path, capsys):
    error = refused(capsys, "otter", str(tmp_path / "out"), "--course", str(tmp_path))
    assert error == f"{tmp_path} is not a course: it has no notebooks in solutions/"
    assert not (tmp_path / "out").exists()


GAP = "    # Exercise 2.1: "


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"nbformat": 4', '"nbformat": 3', " is not a notebook of Jupyter's format 4"),
        ("### END SOLUTION", "", ": cell 4 has `### BEGIN SOLUTION` without"),
        ("kit.check.exercise_2_1(b", "print(b", ": no check follows Exercise 2.1"),
        ("check.exercise_2_1(b", "check.exercise_2_2(b", ": a check must be one line"),
        (GAP, "    # ", ": a check must be one line"),
        ('"id": "title", ', "", " is not a notebook of Jupyter's format 4"),
    ],
)
def test_a_notebook_that_was_edited_wrongly_is_refused(
    old, new, words, two_exercises, tmp_path, capsys
):
    path = two_exercises / "solutions" / "02_collectives.ipynb"
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    arguments = ["nbgrader", str(tmp_path / "out"), "--course", str(two_exercises)]
    error = refused(capsys, *arguments)
    assert error.startswith(f"{path}{words}")
    assert error.count("\n") == 0
    assert not (tmp_path / "out").exists()
