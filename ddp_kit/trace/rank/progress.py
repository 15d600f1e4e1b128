"""How far a worker's loop has come, shown while the run lasts. Runs in a rank."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ddp_kit.errors import TraceError
from ddp_kit.trace.rank import recorder

T = TypeVar("T")

is_live = True  # whether there is a live view, which shows bars in place of their text


def progress(iterable: Iterable[T], total: int | None = None) -> Iterator[T]:
    """Yield the items of `iterable`; meanwhile the live view shows a progress bar for this rank.

    total: the number of items, by default `len(iterable)`, or None if that is not known.

    In a process that is no rank it only yields. The bar disappears when the loop ends.

        for images, labels in kit.progress(batches):
            ...
    """
    try:
        iter(iterable)  # a dataset can be looped over, but is not an Iterable
    except TypeError:
        error = TypeError(
            f"progress needs something to loop over, such as range(5), got {iterable!r}"
        )
        shown = [f"TypeError: {error}"]  # by IPython, without the kit's own frames
        error._render_traceback_ = lambda: shown  # type: ignore[attr-defined]
        raise error from None
    if total is None:
        with suppress(TypeError):
            total = len(iterable)  # type: ignore[arg-type]
    elif isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise TraceError(f"total must be a whole number such as 100, or None, got {total!r}")
    return _with_progress(iterable, total)


def _with_progress(iterable: Iterable[T], total: int | None) -> Iterator[T]:
    current = recorder.current
    try:
        for done, item in enumerate(iterable):
            if current is not None:
                current.show_progress(done, total)
            yield item
    finally:
        if current is not None:
            current.show_progress(None, None)


def take_over_tqdm(std: ModuleType) -> None:
    """Show the bars of tqdm in the live view if there is one, and not as text among the prints.

    std: the module `tqdm.std`, whose class the others inherit from.
    """
    bars: WeakKeyDictionary[Any, None] = WeakKeyDictionary()  # in the order of their loops

    def display(
        original: Callable, bar: Any, msg: str | None = None, pos: int | None = None
    ) -> bool:
        if msg != "":  # which would clear it
            with suppress(Exception):  # its numbers may be NaN, or too large for the board
                bars[bar] = None
                _show_bar(bar)
        return True

    def close(original: Callable, bar: Any) -> None:
        bar.sp = None  # it writes nothing at its end, like a bar of a GUI
        original(bar)
        with suppress(Exception):  # another thread may have opened a bar meanwhile
            around = [other for other in list(bars) if _is_shown(other)]
            _show_bar(around[-1] if around else None)  # the innermost

    def write_nothing(original: Callable, bar: Any, *_args: Any, **_kwargs: Any) -> None:
        pass

    for shown in (display, close):
        _replace(std.tqdm, shown.__name__, shown)
    for name in ("clear", "moveto"):  # they move the cursor of a terminal
        _replace(std.tqdm, name, write_nothing)


def _replace(cls: type, name: str, shown: Callable) -> None:
    """Call `shown` with the original method, unless a bar writes to a file."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def either(bar: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_shown(bar):
            return shown(original, bar, *args, **kwargs)
        return original(bar, *args, **kwargs)

    setattr(cls, name, either)


def _is_shown(bar: Any) -> bool:
    """Return whether the live view shows a bar: an open one that would write to the terminal."""
    is_open = is_live and not getattr(bar, "disable", True)
    return is_open and getattr(bar, "fp", None) in (sys.stdout, sys.stderr)


def _show_bar(bar: Any) -> None:
    if (current := recorder.current) is None:
        return
    if bar is None:
        current.show_progress(None, None)
        return
    label = ", ".join(filter(None, [bar.desc.rstrip(": "), str(bar.postfix or "")]))
    # The numbers may be fractions, as of bytes.
    current.show_progress(max(0, int(bar.n)), None if bar.total is None else int(bar.total), label)


def fill_tqdm_notebook(_own: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Define the names of `tqdm.notebook` without its widgets, which a rank cannot show."""
    from tqdm.std import tqdm

    class tqdm_notebook(tqdm):
        """A bar in the live view, or of text."""

        def __init__(self, *args: Any, display: bool = True, **kwargs: Any) -> None:
            kwargs["disable"] = bool(kwargs.get("disable"))
            super().__init__(*args, **kwargs)

    def tnrange(*args: int, **kwargs: Any) -> tqdm_notebook:
        return tqdm_notebook(range(*args), **kwargs)

    names = {"tqdm_notebook": tqdm_notebook, "tnrange": tnrange}
    for name, value in names.items():
        value.__module__, value.__qualname__ = module.__name__, name
    aliases = {"tqdm": tqdm_notebook, "trange": tnrange}
    vars(module).update(names, **aliases, __all__=[*names, *aliases])
