"""The live view of a run: one display below the cell, gone when the run has ended."""

from __future__ import annotations

from IPython.display import display

from ddp_kit.pool import view


class NotebookView:
    """A display that shows the newest line of each rank, and ends as it began.

    nbval compares what a display showed first, and the saved notebook holds what it showed
    last; both are the same heading, so the live part disturbs neither.
    """

    def __init__(self, world_size: int) -> None:
        self._heading = f"{world_size} rank{'s' if world_size > 1 else ''}"
        self._shown = self._heading
        self._handle = display(_text(self._heading), raw=True, display_id=True)

    def update(self, newest: list[str]) -> None:
        """Show the newest line of each rank below the heading."""
        lines = [f"[rank {rank}] {line[:100]}" for rank, line in enumerate(newest) if line]
        self._show("\n".join([self._heading, *lines]))

    def close(self) -> None:
        """Leave the heading only."""
        self._show(self._heading)

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._handle.update(_text(text), raw=True)


def _text(text: str) -> dict[str, str]:
    return {"text/plain": text}


def take_over() -> None:
    """Make runs of this process show themselves in the notebook."""
    view.open_view = NotebookView
