"""The scripts of the lessons, as the cells that write them have them.

Tests do not run notebooks/scripts in place: nbval, in another worker, may be writing a file there.
"""

from __future__ import annotations

import json
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def notebook_of(name: str) -> dict:
    """Return the notebook of a script such as 01_point_to_point.py."""
    path = (NOTEBOOKS / name).with_suffix(".ipynb")
    if not path.exists():  # a lesson may have a second script
        [path] = NOTEBOOKS.glob(f"{name[:3]}*.ipynb")
    return json.loads(path.read_text("utf-8"))


def code_of(notebook: dict) -> list[str]:
    """Return the code cells of a notebook."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def written(cell: str, name: str) -> str | None:
    """Return what a cell writes into a script; None if it does not."""
    first, _, rest = cell.partition("\n")
    writes = first.split() == ["%%writefile", f"scripts/{name}"]
    return rest.rstrip("\n") + "\n" if writes else None


def text_of(name: str) -> str:
    """Return the text of a script."""
    [found] = filter(None, (written(cell, name) for cell in code_of(notebook_of(name))))
    return found
