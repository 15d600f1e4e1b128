"""The live view of a run: one display below the cell, empty when the run has ended."""

from __future__ import annotations

import functools
import importlib
import threading
import warnings

from IPython import get_ipython
from IPython.display import display

from ddp_kit import errors
from ddp_kit.pool import leave, view


class NotebookView:
    """A display that shows the newest line of each rank, and ends empty, as it began.

    nbval compares what a display showed first, and the saved notebook holds what it showed
    last; both are nothing at all, so the live part disturbs neither. All runs of one cell
    share one display.
    """

    _cell: str | None = None  # the message that asked for the cell in which _handle was made
    _handle = None

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._shown = ""
        _load_pictures()
        cell = get_ipython().get_parent().get("header", {}).get("msg_id")
        if cell != NotebookView._cell or NotebookView._handle is None:
            NotebookView._cell = cell
            NotebookView._handle = display({}, raw=True, display_id=True)

    def update(self, newest: list[str], starting: bool = False) -> None:
        """Show the newest line of each rank below a heading."""
        lines = [f"[rank {rank}] {line[:100]}" for rank, line in enumerate(newest) if line]
        text = "\n".join([view.heading(self._world_size, starting), *lines])
        if text != self._shown:
            self._shown = text
            self._handle.update({"text/plain": text}, raw=True)

    def close(self) -> None:
        """Show nothing any more."""
        if self._shown:
            self._handle.update({}, raw=True)


@functools.cache
def _load_pictures() -> None:
    """Import what draws a deadlock while the first ranks start: the error would wait for it."""
    load = functools.partial(importlib.import_module, "ddp_kit.plot")
    threading.Thread(target=load, name="ddp_kit loads its pictures", daemon=True).start()


def _draw_waits(error: errors.DeadlockError) -> None:
    """Show who waits for whom, above the error."""
    from ddp_kit import plot  # matplotlib takes its time

    display(plot.waits(error))


def take_over() -> None:
    """Make runs of this process show themselves in the notebook."""
    # `%run -m` of a lesson that a cell has imported is meant; runpy warns of it on stderr.
    warnings.filterwarnings("ignore", r"'ddp_kit\.lessons\.\w+' found in sys\.modules")
    if hasattr(get_ipython(), "kernel"):  # IPython in a terminal has a terminal's view
        view.open_view = NotebookView
        errors.draw_waits = _draw_waits
        get_ipython().observe(lambda change: leave(change["new"]), "exit_now")
