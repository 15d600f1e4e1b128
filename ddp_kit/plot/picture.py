"""The figure that every function of this package returns."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ddp_kit.plot.style import FAMILY, INK, PAPER, QUIET

DPI = 110


class _Canvas(FigureCanvasAgg):
    """Write a PNG with a palette: a third of the bytes, which a notebook keeps for ever."""

    def print_png(self, filename_or_obj, *, metadata=None, pil_kwargs=None, **_):
        self.draw()
        image = Image.fromarray(np.asarray(self.buffer_rgba())).convert("RGB")
        image = image.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        info = PngInfo()
        for key, value in (metadata or {}).items():
            info.add_text(key, str(value))
        dpi = (self.figure.dpi, self.figure.dpi)
        options = {"optimize": True, "dpi": dpi, "pnginfo": info, **(pil_kwargs or {})}
        image.save(filename_or_obj, format="png", **options)


class Picture(Figure):
    """A matplotlib Figure that a notebook shows by itself, with its numbers as text.

    twin: a plain-text table of what is drawn, the same for the same data; it is the repr,
    so it is what nbval compares and what a reader without the image gets. (It is not called
    `text` because `Figure.text` is the method that `suptitle` uses.)
    """

    def __init__(self, width: float, height: float, twin: str):
        super().__init__(figsize=(width, height), dpi=DPI, facecolor=PAPER, edgecolor=PAPER)
        _Canvas(self)
        self.set_layout_engine("none")
        self.twin = twin

    def __repr__(self) -> str:
        return self.twin

    __str__ = __repr__

    def _repr_png_(self) -> bytes:
        """Draw with the arguments of IPython's own printer: with pyplot or without, one PNG."""
        buffer = io.BytesIO()
        self.savefig(
            buffer,
            format="png",
            dpi=self.dpi,
            facecolor=PAPER,
            edgecolor=PAPER,
            bbox_inches="tight",
            pad_inches=0.1,
        )
        return buffer.getvalue()

    def sheet(self) -> Axes:
        """Add an axes that covers the figure, in inches from its top left corner."""
        width, height = self.get_size_inches()
        ax = self.add_axes((0, 0, 1, 1))
        ax.set(xlim=(0, width), ylim=(height, 0))
        ax.set_axis_off()
        return ax

    def chart(self, left: float, top: float, width: float, height: float, grid: str) -> Axes:
        """Add quiet axes at a place given in inches from the top left; grid: "x" or "y"."""
        full_width, full_height = self.get_size_inches()
        bottom = full_height - top - height
        ax = self.add_axes(
            (left / full_width, bottom / full_height, width / full_width, height / full_height),
            facecolor=PAPER,
        )
        ax.grid(False)
        ax.grid(True, axis=grid, color="#ececec", linewidth=0.8, linestyle="-")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        for side in ("left", "bottom"):
            ax.spines[side].set(color=QUIET, linewidth=0.8, visible=True)
        style = {"color": QUIET, "labelcolor": INK, "direction": "out", "top": False}
        ax.tick_params(
            which="both", **style, right=False, labelsize=9, labelfontfamily=FAMILY, width=0.8
        )
        return ax


def label_axes(ax: Axes, xlabel: str = "", ylabel: str = "") -> None:
    """Name what the axes measure, with units."""
    ax.set_xlabel(xlabel, fontsize=9.5, color=INK, family=FAMILY)
    ax.set_ylabel(ylabel, fontsize=9.5, color=INK, family=FAMILY)
