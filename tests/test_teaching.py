"""The teacher's guide names every notebook, and each mistake of an exercise has its hints."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ddp_kit import check
from ddp_kit.check.hints import hints

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "teaching.md").read_text("utf-8")
GRADERS = [name for name in check.__all__ if name != "credit"]
KINDS = {each.number: each.kind for each in (getattr(check, g).exercise for g in GRADERS)}
EXERCISES = list(KINDS)
GAPS = [n for n in EXERCISES if KINDS[n] == "gap" and n[-1].isdigit()]  # not in the lessons
LESSON = re.compile(r"\]\(\.\./notebooks/(\w+\.ipynb)\) \((\d+)\)")
ESTIMATE = {1: 10, 2: 10, 3: 15, 4: 20, 5: 20}  # minutes, by the number of missing lines
SESSION = 90


def cells(path: Path) -> dict[str, str]:
    """Return the sources of a notebook's cells, by their names."""
    notebook = json.loads(path.read_text("utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}


@cache
def minutes() -> dict[str, dict[str, int]]:
    """Return the minutes of each exercise, by its notebook and its number."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(ROOT.glob("notebooks/exercises/[0-9]*.ipynb")):
        solved = cells(ROOT / "notebooks" / "solutions" / path.name)
        for cell, stub in cells(path).items():
            gap = r'^ *raise NotImplementedError\("Exercise (\d+\.\d+)'
            stated = re.search(gap, stub, re.MULTILINE)
            if stated and KINDS[stated[1]] == "gap":
                missing = solved[cell].count("\n") - stub.count("\n") - 2  # and a comment
                found.setdefault(path.name, {})[stated[1]] = ESTIMATE[missing]
    return found


def test_each_exercise_has_mistakes_which_a_check_names():
    files = (ROOT / "ddp_kit" / "check").glob("*.py")
    source = "".join(path.read_text("utf-8") for path in files)
    for number in EXERCISES:
        if KINDS[number] == "estimate":  # tests/check/test_estimates.py knows those
            continue
        own = {name: hint for name, hint in hints().items() if name.startswith(f"{number} ")}
        mistakes = [name.partition(" ")[2] for name, hint in own.items() if not hint.replace]
        assert len(own) > 1, number
        assert [name for name in mistakes if f'"{name}"' not in source] == [], number


def test_each_mistake_that_a_check_names_has_hints():
    for name, hint in hints().items():
        assert all(text[-1] in ".?" for text in hint[:3]), name
        assert "?" in hint.question, name
    known = {re.sub(r"^(\d+\.\w+|P\d) ", "", name) for name in hints()}
    for module in {getattr(check, name).__module__ for name in GRADERS}:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        assert [name for name in named(tree) if name not in known] == [], module


def named(tree: ast.AST) -> Iterator[str]:
    """Yield the mistakes that a module names in `hint=...` and in dicts called `mistakes`."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="hint", value=ast.Constant(value=str(name))):
                yield name
            case ast.Assign(targets=[ast.Name(id="mistakes")], value=ast.Dict(keys=keys)):
                yield from (key.value for key in keys if isinstance(key, ast.Constant))


def test_each_lesson_is_linked_with_the_minutes_of_the_readme():
    readme = (ROOT / "README.md").read_text("utf-8")
    table = re.findall(r"^\| \[(\w+)\]\(notebooks/\w+\.ipynb\) \| (\d+) \|", readme, re.MULTILINE)
    said = [(name.removesuffix(".ipynb"), took) for name, took in LESSON.findall(GUIDE)]
    assert sorted(said) == sorted(table)
    lessons = {path.name for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    assert lessons == set(re.findall(r"\]\(\.\./notebooks/(\w+\.ipynb)\)", GUIDE))


def test_exercises_have_the_minutes_that_their_missing_lines_suggest():
    for name, each in minutes().items():
        first, *_ = cells(ROOT / "notebooks" / "exercises" / name).values()
        wanted = f"**About {sum(each.values())} minutes**, estimated from the number of missing"
        assert wanted in first, name
    assert sorted(number for each in minutes().values() for number in each) == sorted(GAPS)


def test_sessions_are_short_enough_and_have_the_minutes_of_their_notebooks():
    known = {number: took for each in minutes().values() for number, took in each.items()}
    planned = 0
    for plan in re.findall(r"^\| session \|.*?\n\n", GUIDE, re.MULTILINE | re.DOTALL):
        for row in plan.strip().splitlines()[2:]:
            _, lessons, in_class, home = row.strip("| ").split(" | ")
            for cell in (in_class, home):
                listed = cell.partition(";")[0]
                first_last = re.findall(r"(\d+\.\d+)(?: to (\d+\.\d+))?", listed)
                numbers = [n for first, last in first_last for n in between(first, last or first)]
                said = re.search(r"\((\d+)\)", listed)
                assert int(said[1] if said else 0) == sum(known[n] for n in numbers), row
                planned += len(numbers)
            exercises = re.search(r"\((\d+)\)", in_class)
            whole = sum(int(took) for _, took in LESSON.findall(lessons))
            assert whole + int(exercises[1] if exercises else 0) <= SESSION, row
    assert planned == len(GAPS)


def between(first: str, last: str) -> list[str]:
    """Return the exercises from one to another: 2.3 to 2.5."""
    return GAPS[GAPS.index(first) : GAPS.index(last) + 1]


def test_each_question_names_its_lesson_and_has_an_answer():
    section = GUIDE.split("## Questions for an exam\n")[1].split("\n## ")[0]
    questions = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    assert len(questions) >= 30
    for question in questions:
        (name,) = re.findall(r"^\((\w+)\)", question)
        assert (ROOT / "notebooks" / f"{name}.ipynb").exists(), name
        assert question.count("**Answer:**") == 1, question
