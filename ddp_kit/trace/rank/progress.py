"""How far a worker's loop has come, shown while the run lasts. Runs in a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from ddp_kit.errors import TraceError
from ddp_kit.trace.rank import recorder

T = TypeVar("T")


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
    now = recorder.current
    try:
        for done, item in enumerate(iterable):
            if now is not None:
                now.show_progress(done, total)
            yield item
    finally:
        if now is not None:
            now.show_progress(None, None)
