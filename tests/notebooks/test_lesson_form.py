"""What a lesson asks its reader to do: predict, look at numbers, open the answers.

The rules are as in test_audit.py: each yields what is wrong, and is broken below.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from regenerate import FOLDER
from test_audit import display, lesson, numbered, tags, text

LESSONS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
PREDICTIONS = range(2, 6)
NONE_MADE = "You made no prediction."
COMMENTED_OUT = re.compile(r"^\s*#\s*([\w.]+ = )?[\w.]+\(.*\)\s*$", re.MULTILINE)
FOLDED = re.compile(r"<summary>.*?</summary>(?!\n[ \t]*\n)|(?<!\n)\n[ \t]*</details>")


def tree(cell: dict) -> ast.Module:
    return ast.parse(TransformerManager().transform_cell("".join(cell["source"])))


def shown(cell: dict) -> str:
    return "".join(text(output) for output in cell["outputs"])


def predictions_are_open(notebook: dict) -> Iterator[str]:
    """Refuse a guess that the code cell before does not ask for, or that is stored in its place."""
    asked: dict[str, int] = {}  # in which code cell
    for count, (number, cell) in enumerate(numbered(notebook, "code")):
        judged = 0
        for node in tree(cell).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value) == "...":
                asked |= {ast.unparse(target): count for target in node.targets}
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "kit.predict":
                    judged += 1
                    guess = ast.unparse(call.args[0])
                    if guess not in asked:
                        yield f"cell {number} judges {guess}, and nothing before has {guess} = ..."
                    elif asked[guess] < count - 1:
                        yield f"cell {number} judges {guess}; the next code cell should"
        if shown(cell).count(NONE_MADE) < judged:
            yield f"cell {number} is stored with a prediction"
        if judged and "answer" not in tags(cell):
            yield f"cell {number} judges a prediction and is not tagged answer"


def numbers_not_verdicts(notebook: dict) -> Iterator[str]:
    for number, cell in numbered(notebook, "code"):
        if shown(cell).strip() in ("True", "False"):
            yield f"cell {number} shows nothing but {shown(cell).strip()}"


def nothing_commented_out(notebook: dict) -> Iterator[str]:
    for number, cell in numbered(notebook, "code"):
        for found in COMMENTED_OUT.finditer("".join(cell["source"])):
            yield f"cell {number} has a call that is commented out: {found[0].strip()}"


def folded_answers_are_set(notebook: dict) -> Iterator[str]:
    """Refuse answers whose Markdown is shown as it is typed, or which swallow what follows."""
    for number, cell in numbered(notebook, "markdown"):
        source = "".join(cell["source"])
        for found in FOLDED.finditer(source):
            yield f"cell {number} has no empty line at {found[0].strip()}"
        if source.count("<details>") != source.count("</details>"):
            yield f"cell {number} does not close each <details>"
        if re.search(r"\S #{2,4} ", source):
            yield f"cell {number} has a heading in the middle of a line"
        answer = source.partition("\n#")[0].strip()
        if "answer" in tags(cell) and answer.endswith(":") and "\n\n" not in answer:
            yield f"cell {number} folds what introduces the next cell: begin a paragraph with it"


def what_follows_an_answer_is_folded(notebook: dict) -> Iterator[str]:
    """Refuse a text on an answer in sight; a heading, or what introduces a cell, may follow it."""
    cells = list(enumerate(notebook["cells"]))
    for (_, before), (number, cell) in pairwise(cells):
        first = "".join(cell["source"]).partition("\n\n")[0].strip()
        on_answer = "answer" in tags(before) and before["cell_type"] == "code"
        in_sight = cell["cell_type"] == "markdown" and "answer" not in tags(cell)
        if on_answer and in_sight and not (first.startswith("#") or first.endswith(":")):
            yield f"cell {number} follows an answer and is not tagged answer"


RULES: list[Callable[[dict], Iterator[str]]] = [
    predictions_are_open,
    what_follows_an_answer_is_folded,
    numbers_not_verdicts,
    nothing_commented_out,
    folded_answers_are_set,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_keeps(rule, path):
    assert list(rule(json.loads(path.read_text("utf-8")))) == []


def what_a_lesson_has(notebook: dict) -> Iterator[str]:
    """Refuse a lesson that asks for too little or too much, or leaves readers with a GPU alone."""
    code = "\n".join("".join(cell["source"]) for _, cell in numbered(notebook, "code"))
    if code.count("kit.predict(") not in PREDICTIONS:
        yield f"{code.count('kit.predict(')} predictions; {PREDICTIONS[0]} to {PREDICTIONS[-1]}"
    prose = "\n".join("".join(cell["source"]) for _, cell in numbered(notebook, "markdown"))
    if "> **On your GPU" not in prose:
        yield "no box says what differs on a GPU"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_predictions_and_a_word_on_gpus(path):
    assert list(what_a_lesson_has(json.loads(path.read_text("utf-8")))) == []


# From here on the rules themselves are tested.


def broken(notebook: dict) -> list[str]:
    return [rule.__name__ for rule in RULES if list(rule(notebook))]


def predicting(asks: str, judges: str, printed: str = f"The answer is 1. {NONE_MADE}\n") -> dict:
    notebook = lesson()
    notebook["cells"][1]["source"] = asks
    notebook["cells"][3] |= {"source": judges, "metadata": {"tags": ["answer"]}}
    notebook["cells"][3]["outputs"][0]["text"] = [printed]
    return notebook


def saying(source: str, *given: str) -> dict:
    notebook = lesson()
    notebook["cells"][2] |= {"source": source, "metadata": {"tags": list(given)}}
    return notebook


def test_a_prediction_that_is_not_the_readers_or_is_judged_late_or_in_sight_is_found():
    stored = predicting("mine = ...", "kit.predict(mine, 1)", "Right: 1.")
    never_asked = predicting("mine = 1", "kit.predict(mine, 1)")
    late = predicting("mine = ...", "print(1)")
    late["cells"][5] |= predicting("", "kit.predict(mine, 1)")["cells"][3]
    untagged = predicting("mine = ...", "kit.predict(mine, 1)")
    untagged["cells"][3]["metadata"] = {}
    for notebook in (stored, never_asked, late, untagged):
        assert broken(notebook) == ["predictions_are_open"]


def test_a_text_on_an_answer_in_sight_is_found():
    notebook = predicting("mine = ...", "kit.predict(mine, 1)")
    for source in ("## Next\n\nMore.", "The next cell draws it:\n\n* all of it"):
        notebook["cells"][4]["source"] = source
        assert broken(notebook) == []
    notebook["cells"][4]["source"] = "So it is 1.\n\n## Next"
    assert broken(notebook) == ["what_follows_an_answer_is_folded"]


def test_a_cell_that_shows_only_a_verdict_is_found():
    notebook = lesson()
    notebook["cells"][1]["outputs"] = [display({"text/plain": "True"})]
    assert broken(notebook) == ["numbers_not_verdicts"]


def test_a_call_that_is_commented_out_is_found():
    notebook = lesson()
    notebook["cells"][1]["source"] = "if 1:\n    print(1)\n    # kit.run(worker, world_size=2)"
    assert broken(notebook) == ["nothing_commented_out"]


def test_an_answer_that_is_not_set_as_markdown_is_found():
    merged = saying("It is 3. ### Next")
    answer = saying("It is 3. Here it is drawn:", "answer")
    assert broken(merged) == broken(answer) == ["folded_answers_are_set"]
    for swallowed in ("\nSo.\n\n</details>", "\n\nSo.\n</details>", "\n\nSo."):
        notebook = saying(f"<details><summary>Answer</summary>{swallowed}")
        assert broken(notebook) == ["folded_answers_are_set"]


def test_a_lesson_with_too_few_predictions_or_without_a_word_on_gpus_is_found():
    notebook = saying("> **On your GPU.** The same.")
    notebook["cells"][1]["source"] = "kit.predict(mine, 1)"
    assert list(what_a_lesson_has(notebook)) == ["1 predictions; 2 to 5"]
    notebook = predicting("mine = ...", "kit.predict(mine, 1)\n" * 2)
    assert list(what_a_lesson_has(notebook)) == ["no box says what differs on a GPU"]
