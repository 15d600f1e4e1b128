"""A backend of matplotlib for cells that run on ranks: `plt.show()` sends figures to the notebook.

matplotlib imports it by name, `module://ddp_kit.pool.figures`; nothing else should.
"""

from __future__ import annotations

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddp_kit.pool import shown


class FigureManager(FigureManagerBase):
    """Holds a figure of pyplot until it is shown."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Show all open figures below the prints of this rank."""
        shown.show_figures()


class FigureCanvas(FigureCanvasAgg):
    """Draws a figure into memory."""

    manager_class = FigureManager
