"""The teacher's guide names every notebook, and each mistake of an exercise has its hints."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ddp_kit import check
from ddp_kit.check.hints import hints, solutions
from ddp_kit.progress_file import in_order

sys.path.append(str(Path(__file__).parent / "course"))

import half_right

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "teaching.md").read_text("utf-8")


@cache  # not when this file is imported: it imports all lessons
def kinds() -> dict[str, str]:
    """Return the kind of each exercise, by its number."""
    graders = (getattr(check, name) for name in check.__all__ if name != "credit")
    return {grader.exercise.number: grader.exercise.kind for grader in graders}


def to_plan() -> list[str]:
    """Return the exercises for which a teacher plans time, in their order."""
    gaps = ("gap", "function", "record")
    chosen = [number for number, kind in kinds().items() if kind in gaps]
    return sorted((number for number in chosen if not number[-1].isalpha()), key=in_order)


def test_each_exercise_has_mistakes_which_a_check_names():
    files = (ROOT / "ddp_kit" / "check").glob("*.py")
    source = "".join(path.read_text("utf-8") for path in files)
    for number, kind in kinds().items():
        if kind == "estimate":  # tests/check/test_estimates.py knows those
            continue
        own = {name: hint for name, hint in hints().items() if name.startswith(f"{number} ")}
        mistakes = [name.partition(" ")[2] for name, hint in own.items() if not hint.replace]
        assert len(own) > 1, number
        assert [name for name in mistakes if f'"{name}"' not in source] == [], number


def test_what_a_mistake_changes_stands_once_in_its_solution():
    changed = {
        name: hint.replace for name, hint in hints().items() if hint.replace and name[0].isdigit()
    }
    for name, right in changed.items():
        assert solutions()[name.split(" ")[0]]["program"].count(right) == 1, name
    for exercise, (right, _, _) in half_right.ANSWERS.items():
        number = exercise.removeprefix("exercise_").replace("_", ".")
        assert right in solutions()[number]["program"], f"{number} in tests/course/half_right.py"


def test_each_mistake_that_a_check_names_has_hints():
    for name, hint in hints().items():
        assert all(text[-1] in ".?" for text in hint[:3]), name
        assert "?" in hint.question, name
    known = {re.sub(r"^(\d+\.\w+|P\d) ", "", name) for name in hints()}
    for path in (ROOT / "ddp_kit" / "check").glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        assert [name for name in named(tree) if name not in known] == [], path.name


def named(tree: ast.AST) -> Iterator[str]:
    """Yield the mistakes that a module names in `hint=...` and in dicts called `mistakes`."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="hint", value=ast.Constant(value=str(name))):
                yield name
            case ast.Assign(targets=[ast.Name(id="mistakes")], value=ast.Dict(keys=keys)):
                yield from (key.value for key in keys if isinstance(key, ast.Constant))


def test_each_lesson_is_in_the_guide():
    lessons = {path.name for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    assert lessons == set(re.findall(r"\]\(\.\./notebooks/(\w+\.ipynb)\)", GUIDE))


def test_the_sessions_have_each_gap_function_and_record_once():
    planned = []
    for plan in re.findall(r"^\| session \|.*?\n\n", GUIDE, re.MULTILINE | re.DOTALL):
        for row in plan.strip().splitlines()[2:]:
            _, _, in_class, home = row.strip("| ").split(" | ")
            for cell in (in_class, home):
                first_last = re.findall(r"(\d+\.\d+)(?: to (\d+\.\d+))?", cell)
                planned += [n for first, last in first_last for n in between(first, last or first)]
    assert sorted(planned, key=in_order) == to_plan()


def between(first: str, last: str) -> list[str]:
    """Return the exercises from one to another: 2.3 to 2.5."""
    numbers = to_plan()
    return numbers[numbers.index(first) : numbers.index(last) + 1]


def test_each_question_names_its_lesson_and_has_an_answer():
    section = GUIDE.split("## Questions for an exam\n")[1].split("\n## ")[0]
    questions = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    assert len(questions) >= 30
    for question in questions:
        (name,) = re.findall(r"^\((\w+)\)", question)
        assert (ROOT / "notebooks" / f"{name}.ipynb").exists(), name
        assert question.count("**Answer:**") == 1, question
