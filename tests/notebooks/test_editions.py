"""What is made from the solved notebooks: modules, scripts, exercises, a learner's copy."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ddp_kit.course import editions
from ddp_kit.course.cells import folded
from ddp_kit.errors import CourseError

GAP = """def add(a, b):
    total = 0
    # Exercise 4.1: add "both"
    ### BEGIN SOLUTION
    total += a

    total += b
    ### END SOLUTION
    return total"""


def write(path: Path, *cells, **metadata) -> Path:
    notebook = new_notebook(cells=[new_markdown_cell("# A ring: `send`"), *cells])
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path


def code(source: str, *tags: str):
    printed = nbformat.v4.new_output("stream", text="12\n")
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, metadata=metadata, outputs=[printed], execution_count=1)


def sources(text: str) -> list[str]:
    return [cell.source for cell in nbformat.reads(text, 4).cells]


def test_the_committed_editions_are_those_of_the_notebooks():
    made = editions.committed()
    assert len(made) > 40
    different = [
        str(path)
        for path, text in made.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    assert different == [], "run make editions"


def test_each_module_belongs_to_a_notebook():
    made = {path for path in editions.committed() if path.parent.name == "lessons"}
    folder = next(iter(made)).parent
    assert set(folder.glob("[!_]*.py")) == made
    lessons = {path.stem[3:] for path in editions.folder().glob("[0-9]*.ipynb")}
    assert {path.stem for path in made} == lessons


def test_the_learner_writes_what_is_between_the_marks(tmp_path):
    path = write(
        tmp_path / "n.ipynb", code(GAP), new_markdown_cell("Check it:"), code("check(add)")
    )
    *_, stub, _, _, solution = sources(editions.lesson(editions.read(path)))
    assert 'raise NotImplementedError("Exercise 4.1: add \\"both\\"")\n    return total' in stub
    compile(stub, "stub", "exec")
    assert "total += a" not in stub
    assert solution.startswith("<details><summary>Solution</summary>\n\n```python\ndef add")
    assert "    total += a\n\n    total += b\n    return total\n" in solution
    assert "###" not in solution


def test_the_learners_edition_has_no_outputs_and_no_answers_in_sight(tmp_path):
    answer = new_markdown_cell("Twelve.\n\n## Next\n\nMore.", metadata={"tags": ["answer"]})
    failing = code("1 / 0", "raises-exception", "nbval-ignore-output")
    path = write(
        tmp_path / "n.ipynb", code("my_guess = ..."), code("12", "answer"), answer, failing
    )
    made = nbformat.reads(editions.lesson(editions.read(path)), 4)
    assert [cell.outputs for cell in made.cells if cell.cell_type == "code"] == [[], [], []]
    assert made.cells[3].source == (
        "<details><summary>What the run shows</summary>\n\nTwelve.\n\n</details>\n\n"
        "## Next\n\nMore."
    )
    assert [cell.metadata for cell in made.cells] == [{}] * 4 + [{"tags": ["raises-exception"]}]
    assert editions.read(path).cells[2].outputs, "the notebook itself is as it was"


def test_each_gap_has_its_solution_below_the_next_cell_or_at_the_end(tmp_path):
    other = GAP.replace("4.1", "4.2").replace("add", "sum")
    path = write(tmp_path / "n.ipynb", code(GAP), code(other), code("check()"), code(GAP))
    made = sources(editions.lesson(editions.read(path)))
    places = [number for number, source in enumerate(made) if "<summary>Solution" in source]
    assert places == [4, 6]
    assert made[4].count("```python") == 2
    assert made[6].count("```python") == 1


def test_a_comment_in_a_block_of_code_does_not_end_a_folded_answer():
    text = "Run:\n\n```python\nx\n# not a heading\ny\n```\n\n## Next\n\nMore."
    answer, _, rest = folded(text, "Answer").partition("\n\n</details>")
    assert answer.endswith("```python\nx\n# not a heading\ny\n```")
    assert rest == "\n\n## Next\n\nMore."


def test_what_introduces_the_next_cell_is_not_folded():
    assert folded("It is 3.\n\nTry:", "Answer").endswith("It is 3.\n\n</details>\n\nTry:")
    assert folded("It is 3.\n\nWhy?\n\n## Next", "A").endswith("</details>\n\nWhy?\n\n## Next")
    assert folded("It is 3:", "Answer").endswith("It is 3:\n\n</details>")


def test_exercises_and_solutions_each_have_their_own_text(tmp_path):
    first = new_markdown_cell("Try first.", metadata={"tags": ["exercise"]})
    why = new_markdown_cell("Why.", metadata={"tags": ["solution"]})
    notebook = editions.read(write(tmp_path / "n.ipynb", first, code(GAP), why))
    exercises, solutions = editions.exercises(notebook), editions.solutions(notebook)
    assert [source[:10] for source in sources(exercises)] == [
        "# A ring: ",
        "Try first.",
        "def add(a,",
    ]
    assert [source[:10] for source in sources(solutions)] == ["# A ring: ", "def add(a,", "Why."]
    assert "NotImplementedError" in exercises
    assert "NotImplementedError" not in solutions
    assert "### " not in exercises + solutions


def made(tmp_path, hand: str, *cells) -> str:
    path = write(tmp_path / "04_ring.ipynb", *cells)
    return editions.module(path, editions.read(path), hand)


def test_a_module_has_what_tagged_cells_define(tmp_path):
    imports = code("import sys, time\nimport torch\nfrom ddp_kit.lessons import ring as rings")
    cell = code(
        "STEPS = 2\n# Sends.\n@torch.no_grad()\ndef go(x, ä=1):\n    return rings.cut(ä), rings.go"
        "\nresult = go(1)\nprint(result)",
        "module",
    )
    text = made(
        tmp_path, "import time\nLIMIT = 1\n_own = 2\ndef cut(): pass", imports, cell, code("x = 1")
    )
    about, docstring, rest = text.split("\n", 2)
    assert about == "# Made from notebooks/04_ring.ipynb by `make editions`: edit that, not this."
    assert docstring == '"""A ring: `send`."""'
    assert rest == (
        "\nimport torch\n\nfrom ddp_kit.lessons._ring import LIMIT, cut\n\nSTEPS = 2\n\n\n"
        "# Sends.\n@torch.no_grad()\ndef go(x, ä=1):\n    return cut(ä), go\n"
    )


def test_a_module_has_the_imports_that_a_tagged_cell_tries(tmp_path):
    tried = (
        "try:\n    from math import a, b\nexcept ImportError:  # older\n    from cmath import a, b"
    )
    text = made(tmp_path, "", code(f"{tried}\nA = B = a + b", "module"), code(tried))
    assert text.endswith(f"\n\n{tried}\n\n\nA = B = a + b\n")
    assert text.count("try:") == 1


def test_a_module_with_a_main_runs_it(tmp_path):
    text = made(tmp_path, "def main(argv=None): pass", code("def go(): pass", "module"))
    assert text.endswith('\n\nif __name__ == "__main__":\n    run_as_script(main)\n')
    assert "from ddp_kit.lessons._launch import run_as_script\n" in text


def test_scripts_are_what_cells_write(tmp_path):
    path = write(tmp_path / "n.ipynb", code("%%writefile scripts/04_ring.py\nprint(1)"), code("x"))
    assert editions.scripts(editions.read(path)) == {"04_ring.py": "print(1)\n"}


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            [code("x = 1", "modul")],
            "cell 2 has the tag 'modul'; known are answer, exercise, module,",
        ),
        (
            [code(GAP.replace("    ### END SOLUTION\n", ""))],
            "cell 2 has `### BEGIN SOLUTION` without `### END SOLUTION`",
        ),
        ([code(GAP.replace('    # Exercise 4.1: add "both"\n', ""))], "cell 2 must have, each in"),
        (
            [code(GAP.replace("    total += a\n\n    total += b\n", ""))],
            "cell 2 must have, each in",
        ),
        (
            [code("!ls\ndef go(): pass", "module")],
            "cell 2, which is tagged module, must be Python alone: invalid syntax in its line 1",
        ),
        (
            [code("def go(): pass", "module"), code("def go(): pass", "module")],
            "cell 3 defines go for the module, as cell 2 does already",
        ),
        (
            [code("def cut(): pass", "module")],
            "cell 2 defines cut for the module, as _ring.py does",
        ),
    ],
)
def test_a_mistake_in_a_notebook_is_named_with_its_cell(tmp_path, cells, message):
    with pytest.raises(CourseError, match=re.escape(message)) as error:
        made(tmp_path, "def cut(): pass", *cells)
    assert "04_ring.ipynb: cell " in str(error.value)


@pytest.mark.parametrize("text", ["", '{"cells": []}'])
def test_what_is_no_notebook_is_refused(tmp_path, text):
    path = tmp_path / "04_ring.ipynb"
    path.write_text(text)
    with pytest.raises(
        CourseError, match=r"04_ring\.ipynb is not a notebook of Jupyter's format 4"
    ):
        editions.read(path)
    path.unlink()
    with pytest.raises(CourseError, match="is missing"):
        editions.read(path)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of one lesson, whose editions have been made."""
    write(tmp_path / "notebooks/04_ring.ipynb", code("def go(): pass", "module"))
    write(tmp_path / "notebooks/solutions/04_ring.ipynb", code(GAP))
    (tmp_path / "lessons").mkdir()
    monkeypatch.setattr(editions, "LESSONS", tmp_path / "lessons")
    monkeypatch.setattr(editions, "folder", lambda: tmp_path / "notebooks")
    assert editions.main() == 0
    return tmp_path


def test_one_bad_notebook_leaves_every_edition_as_it_was(checkout, capsys):
    write(checkout / "notebooks/04_ring.ipynb", code("def stop(): pass", "module"))
    write(checkout / "notebooks/solutions/04_ring.ipynb", code(GAP, "wrong"))
    assert editions.main() == 1
    assert "has the tag 'wrong'" in capsys.readouterr().err
    assert "def go" in (checkout / "lessons/ring.py").read_text()
