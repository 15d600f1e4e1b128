"""What all pictures share: reading what they are drawn from, the figure, its text table."""

from __future__ import annotations

import io
import reprlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ddp_kit.errors import PlotError
from ddp_kit.plot.style import FAMILY, INK, PAPER, QUIET, WIDTH, fold, write
from ddp_kit.trace import Trace

DPI = 110
LETTER = 0.102  # inches, of a letter of a title
NARROW = 3.4  # inches: narrower, a caption would be a column
LARGEST = 1e300  # of a number that is drawn; beyond, it becomes infinite on the way to the chart


def read_ranks(result: Any) -> list[Any]:
    try:
        ranks = list(result)
    except TypeError:
        raise PlotError(
            f"needs a result or a list with one value per rank, got {short(result)}"
        ) from None
    if not ranks:
        raise PlotError("the result is empty: there is no rank to draw")
    return ranks


def read_trace(source: Any) -> Trace:
    trace = source if isinstance(source, Trace) else getattr(source, "trace", None)
    if not isinstance(trace, Trace):
        raise PlotError(f"needs a trace, a result or an error with a .trace, got {source!r}")
    return trace


def short(value: Any) -> str:
    """Return the repr of a value in one line, cut where it is long."""
    return " ".join(reprlib.repr(value).split())


def read_named(name: str, values: Any, content: str) -> Mapping[str, Any]:
    """Return the mapping that the argument `name` must be; content: what it maps."""
    if not isinstance(values, Mapping):
        raise PlotError(f"{name} must map {content}, got {type(values).__name__}")
    if not values:
        raise PlotError(f"{name} is empty: there is nothing to draw")
    return values


def plain(values: Any) -> Any:
    """Return a tensor, an array or one of their numbers as a list or a number of Python's."""
    return values.tolist() if hasattr(values, "tolist") else values


def read_numbers(values: Any) -> list[Any]:
    """Return a number, or a sequence of them, as a list; what is in it may be no number."""
    values = plain(values)
    is_sequence = isinstance(values, Iterable) and not isinstance(values, str)
    return [plain(value) for value in values] if is_sequence else [values]


class _Canvas(FigureCanvasAgg):
    """Write a PNG with a palette: a third of the bytes, which a notebook keeps forever."""

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
    """A matplotlib Figure that a notebook displays by itself, with its numbers as text.

    text_table: what is drawn as plain text, the same for the same data. It is the repr, which
    nbval compares and a reader without the image sees. (It is not called `text` because
    `Figure.text` is the method that `suptitle` uses.)
    """

    def __init__(self, width: float, height: float, text_table: str):
        super().__init__(figsize=(width, height), dpi=DPI, facecolor=PAPER, edgecolor=PAPER)
        _Canvas(self)
        self.set_layout_engine("none")
        self.text_table = text_table

    def __repr__(self) -> str:
        return self.text_table

    __str__ = __repr__

    def _repr_png_(self) -> bytes:
        """Draw with the arguments of IPython's own printer: with pyplot or without, one PNG."""
        buffer = io.BytesIO()
        style = {"dpi": self.dpi, "facecolor": PAPER, "edgecolor": PAPER}
        self.savefig(buffer, format="png", bbox_inches="tight", pad_inches=0.1, **style)
        return buffer.getvalue()

    def chart(
        self, left: float, top: float, width: float, height: float, grid: str, xlabel="", ylabel=""
    ) -> Axes:
        """Add plain axes, at a place in inches from the top left corner.

        grid: the axis whose ticks have grid lines, "x", "y" or "both".
        """
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
        ax.set_xlabel(xlabel, fontsize=9.5, color=INK, family=FAMILY)
        ax.set_ylabel(ylabel, fontsize=9.5, color=INK, family=FAMILY)
        return ax


AnyPicture = TypeVar("AnyPicture", bound=Picture)


def open_picture(
    title: str,
    text_table: str,
    width: float,
    below: float,
    caption: str = "",
    kind: type[AnyPicture] = Picture,
) -> tuple[AnyPicture, Axes]:
    """Return a picture with its title and caption, and the sheet that they are written on.

    The sheet is axes that cover the picture, in inches from its top left corner. It is wider than
    `width` where the title and the caption need that. A title that is wider than WIDTH, too, is
    cut; the text table has all of it.

    below: where the caption begins, which is broken into lines. kind: the class of the picture.
    """
    width = max(width, NARROW, min(WIDTH, LETTER * len(title)))
    lines = fold(caption, width)
    height = below + 0.17 * len(lines) + 0.05
    picture = kind(width, height, text_table)
    sheet = picture.add_axes((0, 0, 1, 1))
    sheet.set(xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    letters = int(max(width, WIDTH) / LETTER)
    write(sheet, 0, 0.12, textwrap.shorten(title, letters, placeholder=" ..."), 11.5, weight="bold")
    for i, line in enumerate(lines):
        write(sheet, 0, below + 0.06 + 0.17 * i, line, 8.5, color=QUIET)
    return picture, sheet


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], align: str = ">"
) -> str:
    """Return rows of text as lines of columns under a title.

    The first column is aligned left, the others as `align` says: "<" left, ">" right.
    """
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligns = ["<"] + [align] * (len(header) - 1)
    aligned = [
        "  ".join(f"{text:{a}{w}}" for text, a, w in zip(line, aligns, widths, strict=True))
        for line in lines
    ]
    return "\n".join([title, *(line.rstrip() for line in aligned)])
