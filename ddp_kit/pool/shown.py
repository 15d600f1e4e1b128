"""What a cell on a rank shows in the notebook: values, figures, the last expression.

Everything here runs in a rank, but for `Sealed.open`.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ddp_kit.pool import values

FIGURES = "module://ddp_kit.pool.figures"  # what pyplot draws with in a cell

# How IPython shows a value: text, HTML, PNG or what else there is, by MIME type; and metadata.
Bundle = tuple[dict[str, Any], dict[str, Any]]

_bundles: list[Bundle] = []  # what the cell that runs now has shown


@dataclass(frozen=True)
class Sealed:
    """A value that the notebook may be unable to rebuild, and the text that then stands for it."""

    pickled: bytes | None
    text: str

    def open(self) -> Any:
        """Return the value, or its text."""
        try:
            return pickle.loads(self.pickled) if self.pickled is not None else self.text
        except Exception:  # whatever the value's own classes raise
            return self.text


@dataclass(frozen=True)
class Shown:
    """To the notebook: the value of a cell's last expression, and all that the cell displayed."""

    value: Any  # sealed, or so plain that nothing can go wrong
    bundles: list[Bundle]
    names: dict[str, list[str]]  # of rank 0: each name, and the names inside its value


@contextmanager
def collecting() -> Iterator[list[Bundle]]:
    """Have pyplot draw for the notebook, and collect what a cell shows."""
    before = os.environ.get("MPLBACKEND", "agg")
    os.environ["MPLBACKEND"] = FIGURES
    _draw_with(FIGURES)
    _bundles.clear()
    try:
        yield _bundles
    finally:
        os.environ["MPLBACKEND"] = before
        if "matplotlib.pyplot" in sys.modules:  # of a cell that raised
            sys.modules["matplotlib.pyplot"].close("all")
        _draw_with(before)


def _draw_with(backend: str) -> None:
    if "matplotlib" in sys.modules:  # else it looks into the environment when it is imported
        sys.modules["matplotlib"].use(backend)


def display(*values: Any) -> None:
    """Show values below the prints of this rank, as a cell of the notebook would."""
    _bundles.extend(filter(any, map(_formatter(), values)))


def show_figures(besides: Any = None) -> None:
    """Show what pyplot has drawn, besides what was shown already, and close it."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        if figure is not besides:
            display(figure)
    pyplot.close("all")


@functools.cache
def _formatter() -> Callable[[Any], Bundle]:
    """Return what tells how IPython shows a value: its text, and HTML, PNG or what there is."""
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.pylabtools import print_figure

    formatter = DisplayFormatter()
    draw = functools.partial(print_figure, fmt="png", base64=True)
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", draw)
    return formatter.format


def seal(value: Any) -> Any:
    """Return a value as it travels: sealed, unless it is so plain that nothing can go wrong."""
    if value is None or type(value) in (bool, int, float, str, torch.Tensor):
        return value
    pickled = None
    with suppress(Exception):  # it cannot travel
        if not values.holds_module(value):
            pickled = values.pickle_whole(value)
    return Sealed(pickled, _text(value))


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # the learner's own __repr__
        return f"(a value of type {type(value).__name__}, whose text could not be made)"


def can_be_sent(value: Any) -> bool:
    """Tell whether a value can travel to the notebook."""
    try:
        if values.holds_module(value):
            return False
        values.pack(value).close()
    except Exception:
        return False
    return True
