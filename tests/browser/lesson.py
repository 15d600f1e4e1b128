"""What a notebook shows in JupyterLab, and what it must show when it has run there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import lab
import nbformat
import pytest
from regenerate import FOLDER, WIDGET, all_notebooks
from test_audit import (
    errors_where_announced,
    executed_in_order,
    nothing_on_stderr,
    shown_everywhere,
)

MOST = 600  # seconds for all cells of a notebook, on a busy machine
RULER = re.compile(r"^\|[\s:|-]+\|$", re.MULTILINE)  # the line below the header of a table


def as_parameters(short: Callable[[str], bool]) -> list:
    """Return all executed notebooks; CI takes the short ones. short: called with each name."""
    executed = [path for path in all_notebooks() if path.parent.name != "exercises"]
    names = {path: str(path.relative_to(FOLDER).with_suffix("")) for path in executed}
    marks = {True: [], False: pytest.mark.long}
    return [pytest.param(p, id=name, marks=marks[short(name)]) for p, name in names.items()]


def shows(notebook) -> tuple[int, int, int]:
    """Count pictures, outputs and tables; an empty output is what a live view leaves.

    Where there is a widget, JupyterLab does not show the picture that comes with it.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [o for cell in code for o in cell.outputs if o.get("data") != {}]
    data = [output.get("data", {}) for output in outputs]
    pictures = sum("image/png" in each and WIDGET not in each for each in data)
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return pictures, len(outputs), len(RULER.findall(prose))


def without_widgets(notebook: dict) -> dict:
    """Return a notebook without what works in JupyterLab only, but with the pictures of it."""
    for cell in (cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        if "explore(" in "".join(cell["source"]):
            kept = [o for o in cell["outputs"] if WIDGET not in o.get("data", {})]
            cell["outputs"] = kept
        if ".interact()" in "".join(cell["source"]):
            for output in cell["outputs"]:
                output.get("data", {}).pop(WIDGET, None)
    return notebook


def check_run(open_notebook: lab.OpenNotebook, path: Path) -> None:
    """Open a committed notebook without its outputs, run it, and look at what it shows."""
    notebook = nbformat.read(path, as_version=4)
    pictures, _, tables = shows(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    document = open_notebook(notebook, path.stem)
    # Lessons read train.py there, and write their own script.
    shutil.copytree(FOLDER / "scripts", document.server.folder / "scripts", dirs_exist_ok=True)
    document.wait_until_it_shows(0, 0, tables)
    document.run_all(MOST)
    ran = without_widgets(document.saved())
    for rule in (executed_in_order, nothing_on_stderr, errors_where_announced, shown_everywhere):
        assert list(rule(ran)) == []
    assert shows(nbformat.from_dict(ran))[0] == pictures
    document.wait_until_it_shows(*shows(nbformat.from_dict(document.saved())))
    assert document.dead_widgets() == []
