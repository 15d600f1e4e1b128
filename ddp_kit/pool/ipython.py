"""What IPython knows about the notebook's cells. Nothing outside IPython."""

from __future__ import annotations

import linecache
import sys
from typing import Any


def shell() -> Any:
    """Return IPython's shell, of a notebook's kernel or in a terminal; None outside IPython."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def cell_names() -> dict[str, str]:
    """Return the notebook's name of the file each cell was compiled in, such as "Cell In[7]"."""
    ipython = shell()
    if ipython is None:
        return {}
    if not hasattr(ipython.compile, "format_code_name"):  # IPython 7, as in Colab: no numbers
        return dict.fromkeys(linecache._ipython_cache, "Cell")  # type: ignore[attr-defined]
    names = {name: ipython.compile.format_code_name(name) for name in list(linecache.cache)}
    return {name: " ".join(label) for name, label in names.items() if label}


def source(name: str) -> str:
    """Return the source of a cell by the name of the file it was compiled in."""
    return "".join(linecache.getlines(name))
