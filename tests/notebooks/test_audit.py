"""What a reader, GitHub and nbval rely on in each committed notebook.

A rule takes a notebook as plain data and yields what is wrong with it. Below the rules, each
is broken once on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from regenerate import FOLDER, METADATA, all_notebooks

from ddp_kit.course.cells import solved, tags

MOST_LINES = 20
MOST_LINES_OF_A_SCRIPT = 60  # of a cell that writes one, which the reader takes home whole
MOST_LINES_OF_AN_EXERCISE = 40  # a whole function has 30, and what is given
CELLS = range(15, 81)
MOST_BYTES = 600_000
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# What differs from machine to machine or from run to run.
UNSTABLE = {
    "a path": re.compile(r"(?<![\w:/.<])/[A-Za-z][\w.-]*/[\w./-]+"),
    "a memory address": re.compile(r"0x[0-9a-f]{6,}"),
    "a network address": re.compile(r"(?<![\d.])(?!127\.)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])"),
    "a process id": re.compile(r"\bpid\W{0,3}\d+", re.IGNORECASE),
    "a time of day": re.compile(r"\b\d{2}:\d{2}:\d{2}\b"),
}


def numbered(notebook: dict, kind: str | None = None) -> Iterator[tuple[int, dict]]:
    """Yield the cells of a kind with their number in the notebook, from 1."""
    for number, cell in enumerate(notebook["cells"], 1):
        if kind in (None, cell["cell_type"]):
            yield number, cell


def outputs(notebook: dict) -> Iterator[tuple[int, dict]]:
    for number, cell in numbered(notebook, "code"):
        for output in cell["outputs"]:
            yield number, output


def text(output: dict) -> str:
    """Return all that can be read in an output; JSON keeps a text whole or in lines."""
    if output["output_type"] == "stream":
        parts = [output["text"]]
    elif output["output_type"] == "error":
        parts = [output["evalue"], *output["traceback"]]
    else:
        parts = [data for mime, data in output["data"].items() if mime.startswith("text/")]
    return ANSI.sub("", "\n".join("".join(part) for part in parts))


def executed_in_order(notebook: dict) -> Iterator[str]:
    counts = [cell["execution_count"] for _, cell in numbered(notebook, "code")]
    if counts != list(range(1, len(counts) + 1)):
        yield f"the code cells were executed as {counts}"


def prose_before_code(notebook: dict) -> Iterator[str]:
    before = None
    for number, cell in numbered(notebook):
        if cell["cell_type"] == "code" and before != "markdown":
            yield f"no prose precedes cell {number}"
        before = cell["cell_type"]


def short_code_cells(notebook: dict) -> Iterator[str]:
    for number, cell in numbered(notebook, "code"):
        lines = solved("".join(cell["source"])).splitlines()
        script = lines[:1] and lines[0].startswith("%%writefile scripts/")
        most = MOST_LINES_OF_A_SCRIPT if script else MOST_LINES
        if re.search(r"^ *# Exercise \d+\.\d", "".join(cell["source"]), re.MULTILINE):
            most = MOST_LINES_OF_AN_EXERCISE
        if len(lines) > most:
            yield f"cell {number} has {len(lines)} lines; {most} is the most"


def right_length(notebook: dict) -> Iterator[str]:
    if len(notebook["cells"]) not in CELLS:
        yield f"{len(notebook['cells'])} cells; {CELLS[0]} to {CELLS[-1]} make a lesson"


def starts_with_a_heading(notebook: dict) -> Iterator[str]:
    first = notebook["cells"][0]
    if first["cell_type"] != "markdown" or not "".join(first["source"]).startswith("# "):
        yield "the first cell is no heading"


def nothing_on_stderr(notebook: dict) -> Iterator[str]:
    for number, output in outputs(notebook):
        if output["output_type"] == "stream" and output["name"] == "stderr":
            yield f"cell {number} wrote to stderr"


def errors_where_announced(notebook: dict) -> Iterator[str]:
    for number, cell in numbered(notebook, "code"):
        raised = any(output["output_type"] == "error" for output in cell["outputs"])
        if raised and "raises-exception" not in tags(cell):
            yield f"cell {number} raised"
        if not raised and "raises-exception" in tags(cell):
            yield f"cell {number} is tagged raises-exception and raised nothing"


def shown_everywhere(notebook: dict) -> Iterator[str]:
    """Refuse what GitHub drops, JupyterLab distrusts, or dies with the kernel."""
    for number, output in outputs(notebook):
        for mime, data in output.get("data", {}).items():
            script = mime == "text/html" and "<script" in "".join(data).lower()
            if script or re.search(r"widget-view|svg|javascript", mime):
                yield f"cell {number} shows {'a script' if script else mime}"


def same_on_every_run(notebook: dict) -> Iterator[str]:
    for number, output in outputs(notebook):
        for what, pattern in UNSTABLE.items():
            if found := pattern.search(text(output)):
                yield f"cell {number} shows {what}: {found[0]}"


def small_file(notebook: dict) -> Iterator[str]:
    size = len(json.dumps(notebook, indent=1, ensure_ascii=False).encode())
    if size >= MOST_BYTES:
        yield f"{size:,} bytes; {MOST_BYTES:,} is too many"


def no_comments_for_nbval(notebook: dict) -> Iterator[str]:
    for number, cell in numbered(notebook):
        if cell["cell_type"] == "code" and "# NBVAL_" in "".join(cell["source"]):
            yield f"cell {number} has an nbval comment; a tag says it without disturbing the reader"


def minimal_metadata(notebook: dict) -> Iterator[str]:
    if notebook["metadata"] != METADATA:
        yield "the notebook's metadata are not those of make notebooks"
    for number, cell in numbered(notebook):
        if more := sorted(set(cell["metadata"]) - {"tags"}):
            yield f"cell {number} has metadata besides tags: {', '.join(more)}"


RULES: list[Callable[[dict], Iterator[str]]] = [
    executed_in_order,
    prose_before_code,
    short_code_cells,
    right_length,
    starts_with_a_heading,
    nothing_on_stderr,
    errors_where_announced,
    shown_everywhere,
    same_on_every_run,
    small_file,
    no_comments_for_nbval,
    minimal_metadata,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", all_notebooks(), ids=lambda p: str(p.relative_to(FOLDER)))
def test_notebook_keeps(rule, path):
    if rule is right_length and path.parent != FOLDER:
        return  # exercises are as long as their number makes them
    if rule in (executed_in_order, errors_where_announced) and path.parent.name == "exercises":
        return  # they are made of the solutions, and not executed
    assert list(rule(json.loads(path.read_text("utf-8")))) == []


# From here on the rules themselves are tested.


def lesson() -> dict:
    """Return a notebook that keeps every rule: eight times prose, then code."""
    cells = []
    for count in range(1, 9):
        prose = {"cell_type": "markdown", "id": f"prose-{count}", "source": f"# Part {count}"}
        code = {"cell_type": "code", "id": f"code-{count}", "source": f"print({count})"}
        printed = {"output_type": "stream", "name": "stdout", "text": f"{count}\n"}
        cells.append(prose | {"metadata": {}})
        cells.append(code | {"metadata": {}, "execution_count": count, "outputs": [printed]})
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": METADATA, "cells": cells}


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["no"]}


def display(data: dict) -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": data}


def broken(notebook: dict) -> list[str]:
    """Name the rules that a notebook breaks."""
    return [rule.__name__ for rule in RULES if list(rule(notebook))]


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("executed_in_order", {"execution_count": 2}),
        ("prose_before_code", {"cell_type": "raw"}),  # and the next cell is code
        ("short_code_cells", {"source": "x = 1\n" * 21}),
        (
            "nothing_on_stderr",
            {"outputs": [{"output_type": "stream", "name": "stderr", "text": ""}]},
        ),
        ("errors_where_announced", {"outputs": [ERROR]}),
        ("shown_everywhere", {"outputs": [display({"text/html": "<script>1</script>"})]}),
        ("small_file", {"outputs": [display({"image/png": "A" * 600_000})]}),
        ("no_comments_for_nbval", {"source": "# NBVAL_SKIP\nprint(1)"}),
        ("minimal_metadata", {"metadata": {"execution": {"iopub.status.busy": "now"}}}),
    ],
)
def test_a_cell_that_breaks_a_rule_is_found(rule, changed):
    notebook = lesson()
    notebook["cells"][2 if "cell_type" in changed else 1] |= changed
    assert broken(notebook) == [rule]


def test_a_notebook_that_breaks_a_rule_is_found():
    short, without_heading = lesson(), lesson()
    del short["cells"][14:]
    assert broken(short) == ["right_length"]
    without_heading["cells"][0]["source"] = "We begin."
    assert broken(without_heading) == ["starts_with_a_heading"]


@pytest.mark.parametrize(
    "printed",
    [
        "<object object at 0x7f3a5c0d1e90>",
        ["in two\n", "lines: \x1b[32m/somewhere/below\x1b[0m"],
    ],
)
def test_a_text_that_differs_from_run_to_run_is_found(printed):
    error = ERROR | {"evalue": "".join(printed)}
    stream = {"output_type": "stream", "name": "stdout", "text": printed}
    for output in (display({"text/plain": printed}), error, stream):
        notebook = lesson()
        notebook["cells"][1]["outputs"] = [output]
        assert "same_on_every_run" in broken(notebook)
