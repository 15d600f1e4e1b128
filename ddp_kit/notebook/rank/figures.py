"""A matplotlib backend for cells on ranks: `plt.show()` sends figures to the notebook.

Only matplotlib imports it, by the name `module://ddp_kit.notebook.rank.figures`.
"""

from __future__ import annotations

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddp_kit.notebook.rank import output


class FigureManager(FigureManagerBase):
    """A figure of pyplot until it is shown."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Show all open figures below the prints of this rank."""
        output.show_figures()


class FigureCanvas(FigureCanvasAgg):
    """Draws a figure into memory."""

    manager_class = FigureManager
