"""A matplotlib backend for ranks: `plt.show()` sends figures to the notebook.

Only matplotlib imports it, by the name `module://ddp_kit.pool.rank.figures`.
"""

from __future__ import annotations

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddp_kit.pool.rank import displayed


class FigureManager(FigureManagerBase):
    """A figure of pyplot until it is shown."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Show all open figures below the prints of this rank."""
        displayed.show_figures()

    def show(self) -> None:
        """Show this figure below the prints of this rank."""
        displayed.display(self.canvas.figure)


class FigureCanvas(FigureCanvasAgg):
    """Draws a figure into memory."""

    manager_class = FigureManager
