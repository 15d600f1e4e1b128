"""Execute notebooks in place, so that the same cells give the same bytes.

python tests/notebooks/regenerate.py [NOTEBOOK ...]    without a name: all but the exercises

A notebook with a cell that fails stays as it was.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"


class ThisPython(AsyncKernelManager):
    """Starts the kernel of this interpreter, whatever else is installed as python3."""

    @property
    def kernel_spec(self) -> KernelSpec:
        # The kernel would warn that it talks over TCP; it does so on the loopback only.
        return KernelSpec(**get_kernel_dict(extra_arguments=["--log-level=ERROR"]))


def all_notebooks() -> list[Path]:
    """List the notebooks of the course in order, without a learner's own and checkpoints."""
    found = sorted([*FOLDER.rglob("[0-9][0-9]_*.ipynb"), *FOLDER.glob("projects/[0-9]_*.ipynb")])
    return [path for path in found if ".ipynb_checkpoints" not in path.parts]


def execute(path: Path) -> bytes:
    """Run a notebook and return it as a file; raise RuntimeError if a cell fails."""
    notebook = nbformat.v4.upgrade(nbformat.read(path, as_version=4))
    started = []
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        kernel_manager_class=ThisPython,
        record_timing=False,
        coalesce_streams=True,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=lambda cell, cell_index: started.append(cell_index + 1),
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        # The text of the first kind is a whole traceback; its two parts are enough.
        what = f"{error.ename}: {error.evalue}" if hasattr(error, "ename") else error
        raise RuntimeError(f"cell {started[-1]}: {what}") from None
    notebook.metadata = METADATA
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET, None)  # a widget needs its kernel; its picture stays
        cell.metadata = {key: cell.metadata[key] for key in ("tags",) if key in cell.metadata}
    return nbformat.writes(notebook).rstrip("\n").encode() + b"\n"


def main(names: list[str]) -> int:
    """Regenerate each notebook; return 1 if one failed, else 0."""
    failed = False
    solved = [path for path in all_notebooks() if path.parent.name != "exercises"]
    for path in [Path(name).resolve() for name in names] or solved:
        start = time.monotonic()
        try:
            data = execute(path)
        except RuntimeError as error:
            failed = True
            print(f"{path.name}: left as it was. {error}", flush=True)
            continue
        outcome = "unchanged" if path.read_bytes() == data else "written"
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(data)
        os.replace(new, path)  # in one step: no reader sees half a notebook
        print(f"{path.name}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
