"""The editions of a notebook: what is made from the solved one, so that nothing is written twice.

`python -m ddp_kit.course.editions`, which is `make editions`, writes those that are committed: the
lessons' modules, the scripts, the exercises, the checks' solutions, and the page of hints. The tags
of cells say what goes where:

    module       its functions, classes, CONSTANTS and `try: from ... import` go into the module
    answer       shows the answer to a prediction: it is folded until the learner has guessed
    exercise     is in the exercises only
    solution     is in the solutions only

The lines between `### BEGIN SOLUTION` and `### END SOLUTION` are for the learner to write. The
comment above them says what is missing.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.validator import iter_validate

from ddp_kit.check.hints import hints
from ddp_kit.course.cells import (
    BEGIN,
    END,
    GAP,
    folded,
    may_fail,
    number_of,
    solved,
    tags,
    tasks,
    unsolved,
)
from ddp_kit.errors import CourseError

TAGS = {"module", "answer", "exercise", "solution", "nbval-ignore-output", "raises-exception"}
# In a checkout this is a link to notebooks/, and a wheel has the files themselves.
_HANDOUT = Path(__file__).with_name("handout")
# A learner's own files may be beside them. pyproject.toml has the same patterns.
_PATTERNS = (
    "[0-9][0-9]_*.ipynb",
    "exercises/[0-9][0-9]_*.ipynb",
    "solutions/[0-9][0-9]_*.ipynb",
    "projects/[0-9]_*.ipynb",
    "projects/[0-9]_*.py",
    "scripts/[0-9][0-9]_*.py",
    "scripts/train.py",
    "scripts/train_min.py",
    "scripts/job.sh",
    "scripts/two_hosts.sh",
)
LESSONS = Path(__file__).parents[1] / "lessons"
HINTS_PAGE = """# The hints of the checks

If an answer is wrong, its check says on how many ranks, which rank holds what, and what it should
hold. The next check that finds this mistake also asks a *question*, and the one after that says
where to look, the *place*. `kit.check.exercise_4_1(reduce_scatter, hint=3)` says both at once, and
`hint=4` a solution. With `DDP_KIT_HINTS=2` in the environment of the notebook, nobody gets
further than the question.

This page is made from the files `ddp_kit/check/*.ini`.
"""
SCRIPT = "%%writefile scripts/"


def folder() -> Path:
    """Return the folder that has the lessons, exercises/, solutions/ and scripts/.

    Raises CourseError if this installation has none.
    """
    if not (_HANDOUT / "exercises").is_dir():
        raise CourseError(
            "this installation of ddp_kit has no notebooks: install it from its wheel, or from a "
            "checkout on a file system with symbolic links"
        )
    return _HANDOUT.resolve()


def files() -> list[Path]:
    """Return the course's files, as sorted paths inside its folder."""
    course = folder()
    found = (path for pattern in _PATTERNS for path in course.glob(pattern))
    return sorted(path.relative_to(course) for path in found)


def write(path: Path, content: bytes) -> bool:
    """Write a file as a whole or not at all; return whether it changed."""
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return True


def read(path: Path) -> NotebookNode:
    """Return a solved notebook. Raises CourseError if its editions cannot be made."""
    try:
        notebook = nbformat.from_dict(json.loads(path.read_text("utf-8")))
        for problem in iter_validate(notebook, version=4, version_minor=5):
            raise problem
    except FileNotFoundError:
        raise CourseError(f"{path} is missing") from None
    except (OSError, ValueError, nbformat.ValidationError):
        raise CourseError(f"{path} is not a notebook of Jupyter's format 4") from None
    for number, cell in enumerate(notebook.cells, 1):
        cell.source = "".join(cell.source)
        if unknown := sorted(tags(cell) - TAGS):
            known = ", ".join(sorted(TAGS))
            raise CourseError(
                f"{path}: cell {number} has the tag {unknown[0]!r}; known are {known}"
            )
        if cell.cell_type == "code" and (problem := _problem_of_gaps(cell.source)):
            raise CourseError(f"{path}: cell {number} {problem}")
    return notebook


def _problem_of_gaps(source: str) -> str:
    """Return what is wrong with the gaps of a cell; "" if nothing is."""
    for mark, other in ((BEGIN, END), (END, BEGIN)):
        if source.count(mark) > source.count(other):
            return f"has `{mark}` without `{other}`"
    rest = GAP.sub("", source)
    if BEGIN in rest or END in rest:
        return (
            "must have, each in a line of its own and indented alike, a comment that says what is "
            f"missing, `{BEGIN}`, the solution, and `{END}`"
        )
    return ""


def text_of(notebook: NotebookNode, cells: Iterable[NotebookNode]) -> str:
    """Return a notebook with these cells as the text of a file."""
    whole = nbformat.from_dict({**notebook, "cells": [cell.copy() for cell in cells]})
    return nbformat.writes(whole).rstrip("\n") + "\n"


def without(notebook: NotebookNode, tag: str) -> Iterator[NotebookNode]:
    """Yield the cells that do not have a tag, as copies without outputs."""
    for cell in notebook.cells:
        if tag not in tags(cell):
            bare = {"outputs": [], "execution_count": None} if cell.cell_type == "code" else {}
            yield nbformat.from_dict({**cell, "metadata": {**cell.metadata}, **bare})


def exercises(notebook: NotebookNode) -> str:
    """Return the exercises of solved ones. A cell may fail as long as it is not solved."""
    cells = list(without(notebook, "solution"))
    for cell in cells:
        cell.metadata.pop("tags", None)
        if cell.cell_type == "code":
            cell.source = unsolved(cell.source)
            cell.metadata["tags"] = ["nbval-ignore-output", "raises-exception"]
    return text_of(notebook, cells)


def lesson(notebook: NotebookNode) -> str:
    """Return a lesson for the learner: gaps, no outputs, and answers folded."""
    cells: list[NotebookNode] = []
    solution = ""  # of gaps that no other code cell has followed yet
    for cell in without(notebook, "solution"):
        answers = "answer" in tags(cell)
        cell.metadata = {"tags": ["raises-exception"]} if may_fail(cell) else {}
        cells.append(cell)
        if cell.cell_type == "markdown":
            cell.source = folded(cell.source, "What the run shows") if answers else cell.source
        elif tasks(cell.source):
            solution += f"\n\n```python\n{solved(cell.source)}\n```"
            cell.source = unsolved(cell.source)
        elif solution:
            cells.append(_solution(cell, solution))
            solution = ""
    if solution:
        cells.append(_solution(cells[-1], solution))
    return text_of(notebook, cells)


def _solution(check: NotebookNode, text: str) -> NotebookNode:
    """Return the cell below a check that shows the solution on demand."""
    return nbformat.v4.new_markdown_cell(folded(text, "Solution"), id=f"{check.id}-solution")


def solutions(notebook: NotebookNode) -> str:
    """Return solved exercises without the marks of their gaps."""
    cells = [nbformat.from_dict({**c}) for c in notebook.cells if "exercise" not in tags(c)]
    for cell in cells:
        cell.source = solved(cell.source)
    cells[0].source = cells[0].source.replace("# Exercises:", "# Solutions:", 1)
    return text_of(notebook, cells)


def scripts(notebook: NotebookNode) -> dict[str, str]:
    """Return the programs that cells write into scripts/, by their names."""
    sources = [cell.source for cell in notebook.cells if cell.source.startswith(SCRIPT)]
    found = [source.removeprefix(SCRIPT).partition("\n") for source in sources]
    return {name.strip(): text + "\n" for name, _, text in found}


def module(path: Path, notebook: NotebookNode, hand: str) -> str:
    """Return the module of a lesson. hand: the code of `_name.py`, whose public names it shares."""
    name = path.stem[3:]
    shared = list(_public(ast.parse(hand)))
    imports, code = _collected(path, notebook, dict.fromkeys(shared, f"_{name}.py"))
    if "main" in shared:
        imports.append("from ddp_kit.lessons._launch import run_as_script")
        code.append('if __name__ == "__main__":\n    run_as_script(main)')
    body = "\n".join(dict.fromkeys(imports)) + "\n\n" + "\n\n\n".join(code) + "\n"
    used_imports = "--config", "lint.per-file-ignores = {}", "--select", "F401,I"
    body = _ruff(name, body, "check", *used_imports, "--fix", "--quiet")
    if shared:
        body = f"from ddp_kit.lessons._{name} import {', '.join(shared)}\n{body}"
    title = notebook.cells[0].source.splitlines()[0].removeprefix("# ").replace('"', "'")
    body = f'"""{title}{"" if title.endswith("?") else "."}"""\n\n{body}'
    body = _ruff(name, body, "check", "--select", "I", "--fix", "--quiet")
    body = _ruff(name, body, "format", "--quiet")
    return f"# Made from notebooks/{path.name} by `make editions`: edit that, not this.\n{body}"


def _collected(
    path: Path, notebook: NotebookNode, found: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Return the imports of all cells, and what the tagged ones define.

    found: where names are defined already; it gets those of the cells.
    """
    name, imports, code = path.stem[3:], [], []
    own = _names_of_module(notebook, name)
    for number, cell in enumerate(notebook.cells, 1):
        is_part = "module" in tags(cell)
        source = solved(cell.source)
        for node in _statements(cell, f"{path}: cell {number}", is_part):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += [] if _is_own(node, name) else [ast.unparse(node)]
                continue
            names = list(_public(ast.Module([node], []))) if is_part else []
            if twice := [one for one in names if one in found]:
                raise CourseError(
                    f"{path}: cell {number} defines {twice[0]} for the module, as "
                    f"{found[twice[0]]} does already"
                )
            if names:
                found |= dict.fromkeys(names, f"cell {number}")
                code.append(_without_prefixes(_with_comment(node, source.splitlines()), own))
    return imports, code


def _is_own(node: ast.stmt, name: str) -> bool:
    """Return whether a statement imports the lesson's module, and nothing else."""
    from_lessons = isinstance(node, ast.ImportFrom) and node.module == "ddp_kit.lessons"
    return from_lessons and [alias.name for alias in node.names] == [name]


def _statements(cell: NotebookNode, place: str, is_part: bool) -> list[ast.stmt]:
    try:
        return ast.parse(solved(cell.source)).body if cell.cell_type == "code" else []
    except SyntaxError as error:  # or a magic
        if is_part:
            raise CourseError(
                f"{place}, which is tagged module, must be Python alone: {error.msg} in its line "
                f"{error.lineno}"
            ) from None
        return []


def _public(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the functions, classes and constants that a module defines."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [target.id for target in targets if isinstance(target, ast.Name)]
            names = [name for name in named if name.isupper()]
        elif isinstance(node, ast.Try):  # of imports, which have other names in other versions
            imports = [one for one in node.body if isinstance(one, ast.ImportFrom)]
            names = [alias.asname or alias.name for one in imports for alias in one.names]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def _names_of_module(notebook: NotebookNode, name: str) -> set[str]:
    """Return the names under which the cells import the lesson's own module."""
    pattern = rf"from ddp_kit\.lessons import {name}(?: as (\w+))?$"
    found = re.findall(pattern, "\n".join(c.source for c in notebook.cells), re.MULTILINE)
    return {alias or name for alias in found}


def _with_comment(node: ast.stmt, lines: list[str]) -> str:
    """Return the source of a statement with its decorators and the comment above it."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)]) - 1
    while first and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def _without_prefixes(source: str, names: set[str]) -> str:
    """Return code that calls what is in its own module, `zero.cut`, by its name alone."""
    prefix = "|".join(sorted(names)) or "(?!)"  # which matches nothing
    return re.sub(rf"(?<![\w.])({prefix})\.(?=\w)", "", source)


def _ruff(name: str, code: str, *command: str) -> str:
    ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename"]
    path = LESSONS / f"{name}.py"
    ended = subprocess.run(
        [*ruff, str(path), "-"], input=code, capture_output=True, text=True, cwd=path.parent
    )
    if not ended.stdout and code:
        raise CourseError(f"ruff could not format the module {name}: {ended.stderr.strip()}")
    return ended.stdout


def _solved(notebook: NotebookNode, setup: str) -> dict[str, dict[str, str]]:
    """Return the code of each exercise: its solution, and the programs with which checks compare.

    setup: what a program needs first.
    """
    found: dict[str, dict[str, str]] = {}
    for cell in notebook.cells:
        if cell.cell_type != "code" or not (number := number_of(cell.source)):
            continue
        entry = found.setdefault(number, {"setup": setup})
        program = solved(cell.source)
        if gaps := GAP.findall(cell.source):
            missing = [textwrap.dedent(lines) for _, _, lines in gaps]
            entry |= {"solution": "\n...\n".join(missing), "program": program}
        elif "solution" in tags(cell):
            entry |= {"solution": program, "program": program}
        else:
            entry["broken"] = program
    return found


def _setup(notebook: NotebookNode, lesson: str = "") -> str:
    """Return the first code cell, and the import of all that a lesson's module has."""
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return f"{first}\nfrom ddp_kit.lessons.{lesson} import *" if lesson else first


def _page_of_hints(
    lessons: Mapping[str, NotebookNode],
    exercises: Mapping[str, NotebookNode],
    projects: Mapping[str, NotebookNode],
) -> str:
    """Return a page for teachers: by exercise, each mistake and what is said of it in steps."""
    lines = [HINTS_PAGE]
    for name, lesson in lessons.items():
        cells = [*lesson.cells, *(exercises[name].cells if name in exercises else [])]
        text = "\n".join(cell.source for cell in cells)
        titles = re.findall(
            r"^(?: *# Exercise (?=\d+\.[a-z])|## \w+ )(\d+\.\w+): (.+)$", text, re.MULTILINE
        )
        lines += [f"## {name}\n"] if titles else []
        for number, title in titles:
            lines += [f"### {number} {title[:1].upper()}{title[1:]}\n", *_table(f"{number} ")]
    lines += ["## The projects\n"] if projects else []
    for name, page in projects.items():
        title = page.cells[0].source.splitlines()[0].removeprefix("# ")
        lines += [f"### Project {name[0]}: {title}\n", *_table(f"P{name[0]} ")]
    return "\n".join([*lines, "## In every exercise\n", *_table("")]).rstrip() + "\n"


def _table(section: str) -> list[str]:
    """Return the hints of an exercise, or with "" those of no exercise, as a table."""
    rows = ["| mistake | question | place |", "|---|---|---|"]
    for name, hint in hints().items():
        if name.startswith(section) if section else not re.match(r"\d|P\d ", name):
            rows.append(f"| {' | '.join(text.replace('|', '&#124;') for text in hint[:3])} |")
    return [*dict.fromkeys(rows), ""]


def committed() -> dict[Path, str]:
    """Return the editions that are committed, by their paths in a checkout."""
    source = folder()
    files: dict[Path, str] = {}
    code: dict[str, dict[str, str]] = {}
    lessons = {path.stem: read(path) for path in sorted(source.glob("[0-9][0-9]_*.ipynb"))}
    for stem, notebook in lessons.items():
        hand = LESSONS / f"_{stem[3:]}.py"
        files |= {source / "scripts" / name: text for name, text in scripts(notebook).items()}
        if any("module" in tags(cell) for cell in notebook.cells):
            own = hand.read_text("utf-8") if hand.exists() else ""
            files[hand.with_name(hand.name[1:])] = module(source / f"{stem}.ipynb", notebook, own)
            code |= _solved(notebook, _setup(notebook, stem[3:]))
    solved = {path.stem: read(path) for path in sorted((source / "solutions").glob("[0-9]*.ipynb"))}
    for name, notebook in solved.items():
        files[source / "exercises" / f"{name}.ipynb"] = exercises(notebook)
        code |= _solved(notebook, _setup(notebook))
    files[LESSONS.parent / "check" / "solutions.json"] = json.dumps(code, indent=1) + "\n"
    projects = {path.stem: read(path) for path in sorted(source.glob("projects/[0-9]_*.ipynb"))}
    files[source.parent / "docs" / "hints.md"] = _page_of_hints(lessons, solved, projects)
    return files


def main() -> int:
    """Write the editions; return the exit status. If one cannot be made, none is written."""
    try:
        files = committed()
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    changed = [path for path, text in files.items() if write(path, text.encode())]
    print(*changed, f"{len(changed)} of {len(files)} editions changed.", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
