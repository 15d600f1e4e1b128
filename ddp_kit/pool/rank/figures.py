"""A matplotlib backend for ranks: `plt.show()` sends figures to the notebook.

Only matplotlib imports it, by the name `module://ddp_kit.pool.rank.figures`.
"""

from __future__ import annotations

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddp_kit.pool.rank import displayed


class FigureManager(FigureManagerBase):
    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        displayed.show_figures()

    def show(self) -> None:
        displayed.display(self.canvas.figure)


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager
