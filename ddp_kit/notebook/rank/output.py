"""What a cell on a rank shows in the notebook: values, figures, the last expression.

Everything here runs in a rank, except `SealedValue.open`.
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

from ddp_kit.pool.wire import payload

FIGURES = "module://ddp_kit.notebook.rank.figures"  # pyplot's backend in a cell

# IPython's representations of a value by MIME type (text, HTML, PNG ...), and metadata.
Bundle = tuple[dict[str, Any], dict[str, Any]]

_bundles: list[Bundle] = []  # what the current cell has shown


@dataclass(frozen=True)
class SealedValue:
    """A value that the notebook may be unable to rebuild, and a text to use instead."""

    pickled: bytes | None
    text: str

    def open(self) -> Any:
        """Return the value, or its text."""
        try:
            return pickle.loads(self.pickled) if self.pickled is not None else self.text
        except Exception:  # whatever the value's own classes raise
            return self.text


@dataclass(frozen=True)
class CellOutput:
    """To the notebook: the value of a cell's last expression, and everything it displayed."""

    value: Any  # a SealedValue, or plain data
    bundles: list[Bundle]
    names: dict[str, list[str]]  # of rank 0: each name with the names inside its value


@contextmanager
def collecting() -> Iterator[list[Bundle]]:
    """Collect what a cell shows; pyplot draws for the notebook meanwhile."""
    before = os.environ.get("MPLBACKEND", "agg")
    os.environ["MPLBACKEND"] = FIGURES
    _draw_with(FIGURES)
    _bundles.clear()
    try:
        yield _bundles
    finally:
        os.environ["MPLBACKEND"] = before
        if "matplotlib.pyplot" in sys.modules:  # figures of a cell that raised
            sys.modules["matplotlib.pyplot"].close("all")
        _draw_with(before)


def _draw_with(backend: str) -> None:
    if "matplotlib" in sys.modules:  # else it reads the environment when it is imported
        sys.modules["matplotlib"].use(backend)


def display(*values: Any) -> None:
    """Show values below the prints of this rank, as a cell of the notebook would."""
    _bundles.extend(filter(any, map(_formatter(), values)))


def show_figures(besides: Any = None) -> None:
    """Show what pyplot has drawn, except `besides`, and close it."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        if figure is not besides:
            display(figure)
    pyplot.close("all")


@functools.cache
def _formatter() -> Callable[[Any], Bundle]:
    """Return IPython's function from a value to its representations."""
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.pylabtools import print_figure

    formatter = DisplayFormatter()
    draw = functools.partial(print_figure, fmt="png", base64=True)
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", draw)
    return formatter.format


def seal(value: Any) -> Any:
    """Return a value as it travels: sealed, unless it is plain data."""
    if value is None or type(value) in (bool, int, float, str, torch.Tensor):
        return value
    pickled = None
    with suppress(Exception):  # it cannot be pickled
        if not payload.holds_module(value):
            pickled = payload.pickle_whole(value)
    return SealedValue(pickled, _text(value))


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # the learner's own __repr__
        return f"(a value of type {type(value).__name__}, whose repr failed)"


def can_be_sent(value: Any) -> bool:
    """Return whether a value can be sent to the notebook."""
    try:
        if payload.holds_module(value):
            return False
        payload.pack(value).close()
    except Exception:
        return False
    return True
