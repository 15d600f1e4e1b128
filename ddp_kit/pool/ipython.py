"""What IPython knows about the notebook's cells. Nothing outside IPython."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any


def shell() -> Any:
    """Return IPython's shell, of a notebook's kernel or in a terminal; None outside IPython."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def has_front_end() -> bool:
    """Return whether a front end such as JupyterLab runs this cell: somebody can see and click.

    JupyterLab names the cell in its request to run it; nbclient, nbconvert and nbval do not.
    """
    request = getattr(shell(), "get_parent", dict)()
    return "cellId" in request.get("metadata", {})


def after_cell(call: Callable[[], object]) -> None:
    """Call `call` once, when the cell that runs now has ended and its error is shown.

    Do nothing outside IPython. If no cell runs now, the next one counts.
    """
    ipython = shell()
    if ipython is None:
        return

    def once(_result: Any = None) -> None:
        ipython.events.unregister("post_run_cell", once)
        call()

    ipython.events.register("post_run_cell", once)


def cell_names() -> dict[str, str]:
    """Return the notebook's name of the file each cell was compiled in, such as "Cell In[7]"."""
    ipython = shell()
    if ipython is None:
        return {}
    if not hasattr(ipython.compile, "format_code_name"):  # IPython 7, as in Colab: no numbers
        return dict.fromkeys(linecache._ipython_cache, "Cell")  # type: ignore[attr-defined]
    names = {name: ipython.compile.format_code_name(name) for name in list(linecache.cache)}
    return {name: " ".join(label) for name, label in names.items() if label}
