"""The teacher's guide names every notebook and exercise, and quotes the hints of the checks."""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from ddp_kit import check

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "teaching.md").read_text("utf-8")
GRADERS = [name for name in check.__all__ if name != "credit"]
EXERCISES = [name.removeprefix("exercise_").replace("_", ".") for name in GRADERS]
SECTION = re.compile(r"^#### (\d+\.\d+) .*?\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (?!mistake \||---)(.+?) \| (.+) \|$", re.MULTILINE)
# Sentences that are facts, and no hints.
FACTS = {"there is no file at `path`"}
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
            if stated := re.search(gap, stub, re.MULTILINE):
                missing = solved[cell].count("\n") - stub.count("\n") - 2  # and a comment
                found.setdefault(path.name, {})[stated[1]] = ESTIMATE[missing]
    return found


@cache
def rows() -> dict[str, list[tuple[str, str]]]:
    """Return what the guide has for each exercise: mistakes and hints."""
    return {number: ROW.findall(section) for number, section in SECTION.findall(GUIDE)}


@cache
def hints(source: str) -> dict[str, re.Pattern[str]]:
    """Return the sentences in a module of checks, with a pattern for what a run makes of each."""
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) for part in parts(node)}
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in inner:
                pass
            case ast.JoinedStr(values=values):
                text = "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in values)
            case _:
                continue
        if len(text) > 14 and " " in text and re.search(r"[.,`]\s*$|\. \{\}$", text):
            found[text] = re.compile(".+".join(map(re.escape, text.strip().split("{}"))))
    return {text: pattern for text, pattern in found.items() if text not in FACTS}


def parts(node: ast.AST) -> list[ast.AST]:
    """Return what belongs to a string with values in it, and the docstring of a function."""
    if isinstance(node, ast.JoinedStr):
        return [part for part in ast.walk(node) if part is not node]
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
        return [body[0].value]
    return []


def modules() -> dict[Path, list[str]]:
    """Return the exercises of each module of checks."""
    found: dict[Path, list[str]] = {}
    for name, number in zip(GRADERS, EXERCISES, strict=True):
        source = sys.modules[getattr(check, name).__module__].__file__
        found.setdefault(Path(source), []).append(number)
    return found


def test_each_exercise_is_there_with_a_mistake():
    assert list(rows()) == EXERCISES
    assert [number for number, found in rows().items() if not found] == []


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
    assert sorted(number for each in minutes().values() for number in each) == sorted(EXERCISES)


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
    assert planned == len(EXERCISES)


def between(first: str, last: str) -> list[str]:
    """Return the exercises from one to another: 2.3 to 2.5."""
    return EXERCISES[EXERCISES.index(first) : EXERCISES.index(last) + 1]


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_each_hint_of_a_check_is_in_the_guide(path):
    quoted = [hint for number in EXERCISES for _, hint in rows()[number]]
    sentences = hints(path.read_text("utf-8"))
    missing = [text for text, one in sentences.items() if not any(map(one.search, quoted))]
    assert missing == []


def test_each_hint_of_the_guide_is_in_a_check():
    texts = [path.read_text("utf-8") for path in (ROOT / "ddp_kit" / "check").glob("*.py")]
    patterns = [pattern for text in texts for pattern in hints(text).values()]
    quoted = [hint for found in rows().values() for _, hint in found]
    assert [hint for hint in quoted if not any(one.fullmatch(hint) for one in patterns)] == []


def test_each_question_names_its_lesson_and_has_an_answer():
    section = GUIDE.split("## Questions for an exam\n")[1].split("\n## ")[0]
    questions = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    assert len(questions) >= 30
    for question in questions:
        (name,) = re.findall(r"^\((\w+)\)", question)
        assert (ROOT / "notebooks" / f"{name}.ipynb").exists(), name
        assert question.count("**Answer:**") == 1, question
