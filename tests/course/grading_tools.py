"""The real tools, nbgrader and Otter-Grader, and what they give to answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ddp_kit.check.hints import solutions as hunts
from ddp_kit.course.__main__ import main
from ddp_kit.course.cells import hunted, number_of, solved, tasks

TOOLS = Path(os.environ.get("DDP_KIT_GRADERS", f"{sys.prefix}-graders"))
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LIMIT = 1800  # seconds, for one call of a tool beside other work
# Points by the id of the cell, and what each test wrote, from the database and the notebook.
_SCORES = """
import json, sys
from nbgrader.api import Gradebook
with Gradebook("sqlite:///gradebook.db") as book:
    found = {}
    for submission in book.assignment_submissions(sys.argv[1]):
        of = found[submission.student.id] = {}
        for notebook in submission.notebooks:
            for grade in notebook.grades:
                of[grade.name] = [grade.score, grade.max_score]
print(json.dumps(found))
"""

Answer = Callable[[str, str], str]  # from the exercise and its solution


def sources(kind: str, name: str, course: Path = NOTEBOOKS) -> dict[str, str]:
    """Return the cells of a notebook by their ids."""
    cells = json.loads((course / kind / f"{name}.ipynb").read_text("utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def exercises_of(name: str, course: Path = NOTEBOOKS) -> dict[str, str]:
    """Return the exercise of each cell that has a gap or a broken program, or that checks it."""
    found, exercise = {}, ""
    solutions = sources("solutions", name, course)
    for cell, source in sources("exercises", name, course).items():
        if number := number_of(solutions.get(cell, source)):
            exercise = f"exercise_{number.replace('.', '_')}"
            found[cell] = exercise
        elif source.startswith(f"kit.check.{exercise}("):
            found[cell] = exercise
    return found


def submit(release: Path, to: Path, answers: Answer, course: Path = NOTEBOOKS) -> None:
    """Fill in the gaps of a notebook that was handed out, and repair its programs."""
    notebook, exercises = json.loads(release.read_text("utf-8")), exercises_of(release.stem, course)
    solutions = sources("solutions", release.stem, course)
    for cell in notebook["cells"]:
        stub, number = "".join(cell["source"]), hunted("".join(cell["source"]))
        if number:
            cell["source"] = answers(exercises[cell["id"]], hunts()[number]["solution"]) or stub
        elif tasks(solutions.get(cell["id"], "")):
            cell["source"] = answers(exercises[cell["id"]], solved(solutions[cell["id"]])) or stub
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(notebook), "utf-8")


def call(folder: Path, *command: str) -> str:
    """Run a command of the tools' environment, whose ranks are forked; return what it wrote."""
    environment = os.environ | {
        "PATH": f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(NOTEBOOKS.parent), os.environ.get("PYTHONPATH", "")]),
        "DDP_KIT_FORKED_SPAWN": "torch._dynamo",
        "DDP_KIT_CHECK_SECONDS": str(LIMIT / 4),
        "JUPYTER_PLATFORM_DIRS": "1",
        "HOME": str(folder),
    }
    ended = subprocess.run(
        [TOOLS / "bin" / command[0], *command[1:]],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def nbgrader(
    folder: Path, name: str, students: dict[str, Answer], course: Path = NOTEBOOKS
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the points of each student by exercise, and the most there are."""
    if not (folder / "source").exists():
        assert main(["nbgrader", str(folder), "--course", str(course)]) == 0
    call(folder, "nbgrader", "generate_assignment", name)
    release = folder / "release" / name / f"{name}.ipynb"
    for student, answers in students.items():
        submit(release, folder / "submitted" / student / name / release.name, answers, course)
    call(folder, "nbgrader", "autograde", name, f"--Execute.timeout={LIMIT / 2:.0f}")
    found = json.loads(call(folder, "python", "-c", _SCORES, name))
    exercises = exercises_of(name, course)
    return {
        student: {exercises[cell]: tuple(points) for cell, points in scores.items()}
        for student, scores in found.items()
    }


def otter(
    folder: Path, name: str, students: dict[str, Answer], course: Path = NOTEBOOKS
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the points of each student by exercise, and the most there are."""
    if not folder.exists():
        assert main(["otter", str(folder), "--course", str(course)]) == 0
    own, found = folder / name, {}
    call(own, "otter", "generate", "-t", "tests")
    for student, answers in students.items():
        submission, results = own / student / f"{name}.ipynb", own / student / "results"
        submit(own / f"{name}.ipynb", submission, answers, course)
        results.mkdir()
        call(own, "otter", "run", "-a", "autograder.zip", "-o", str(results), str(submission))
        scores: dict[str, tuple[float, float]] = {}
        for test in json.loads((results / "results.json").read_text("utf-8"))["tests"]:
            if test["name"].startswith("exercise_"):
                scores[test["name"]] = test["score"], test["max_score"]
        found[student] = scores
    return found
