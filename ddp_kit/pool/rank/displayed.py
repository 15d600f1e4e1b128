"""What a worker displays as in a cell: figures, HTML, tables. It is shown when the run has ended.

IPython and matplotlib are changed when the worker imports them. In a rank of a script nothing
changes, and `display` prints text.
"""

from __future__ import annotations

import builtins
import functools
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from ddp_kit import settings
from ddp_kit.pool.rank.import_hooks import on_import
from ddp_kit.pool.wire.messages import Bundle

FIGURES = "module://ddp_kit.pool.rank.figures"  # pyplot's backend
WIDGET = "application/vnd.jupyter.widget-view+json"  # names a model that only the rank has


class Displayed:
    """What was displayed in one run, in this order, by its id if it has one."""

    def __init__(self) -> None:
        self.bundles: dict[object, Bundle] = {}
        self.size = self.left_out = 0

    def put(self, bundle: Bundle, name: object) -> None:
        """Add what was displayed, or put it in the place of what had its id."""
        more = _size(bundle) - _size(self.bundles.get(name, ({}, {})))
        if self.size + more > settings.DISPLAYED_KEPT:
            self.left_out += 1
        else:
            self.bundles[name] = bundle
            self.size += more


def _size(bundle: Bundle) -> int:
    values = bundle[0].values()
    return sum(len(v) if isinstance(v, str | bytes) else len(json.dumps(v)) for v in values)


_displayed = Displayed()


@functools.cache
def enable() -> None:
    """Have pyplot and IPython send to the notebook what this process displays from now on."""
    on_import("IPython.core.display_functions", _replace_display)
    on_import("IPython.core.display", _replace_display)  # where IPython 7 has the functions
    on_import("matplotlib", _draw_for_notebook)


def restore() -> None:
    """Undo what a worker may have changed of `enable`; in a notebook, `display` is a builtin."""
    enable()
    builtins.display = display  # type: ignore[attr-defined]
    if (matplotlib := sys.modules.get("matplotlib")) is not None:  # None: not to be imported
        _draw_for_notebook(matplotlib)


def _draw_for_notebook(matplotlib: ModuleType) -> None:
    matplotlib.use(FIGURES)


def _replace_display(module: ModuleType) -> None:
    # `IPython.display` takes its names from here later. IPython's own functions would only print,
    # because a rank has no shell.
    for function in (display, publish_display_data, clear_output):
        setattr(module, function.__name__, function)


def display(
    *objs: Any,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    metadata: dict | None = None,
    transient: dict | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    clear: bool = False,
    update: bool = False,
    **_options: Any,
) -> Any:
    """Show values below the prints of this rank, as IPython's `display` does in a cell.

    Raises TypeError for raw data that is not JSON, and for an update without an id.
    """
    handle = None
    if name := (transient or {}).get("display_id") or display_id:
        from IPython.display import DisplayHandle

        handle = DisplayHandle(None if name is True else name)
    if clear:
        clear_output()
    for value in objs:
        data, own = (value, {}) if raw else _formatter()(value, include, exclude)
        if data:  # else the value has displayed itself
            _publish(data, {**own, **(metadata or {})}, handle and handle.display_id, update)
    if handle is not None and not objs:
        _publish({}, {}, handle.display_id, update)  # a place for an update
    return handle if display_id else None


def publish_display_data(
    data: dict, metadata: dict | None = None, *, transient: dict | None = None, **options: Any
) -> None:
    """Show representations of a value below the prints of this rank."""
    name = (transient or {}).get("display_id")
    _publish(data, metadata or {}, name, options.get("update", False))


def clear_output(wait: bool = False) -> None:
    """Forget what was displayed in this run. What was printed stays."""
    global _displayed
    _displayed = Displayed()


def _publish(data: dict, metadata: dict, name: str | None, update: bool) -> None:
    plain = {kind: _plain(value) for kind, value in data.items() if kind != WIDGET}
    bundle = plain, _plain(metadata)
    if update and not name:
        raise TypeError("display_id required for update_display")  # in IPython's words
    if not update or name in _displayed.bundles:
        _displayed.put(bundle, name or object())


def _plain(value: Any) -> Any:
    """Return what a notebook's file can contain of a value. Raise TypeError if it cannot."""
    return value if type(value) in (str, bytes) else json.loads(json.dumps(value))


def show_figures(besides: Any = None) -> None:
    """Show what pyplot has drawn, except `besides`, and close it."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        if figure is not besides:
            display(figure)
    pyplot.close("all")


def take() -> list[Bundle]:
    """Return what was displayed since the last call; close figures that nobody has shown."""
    with suppress(Exception):  # it may be half imported
        if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
            pyplot.close("all")
    taken = list(filter(any, _displayed.bundles.values()))
    if _displayed.left_out:
        limit = f"a rank may display {settings.DISPLAYED_KEPT:,} bytes a run"
        line = f"... {_displayed.left_out} more left out: {limit}"
        taken.append(({"text/plain": line}, {}))
    clear_output()
    return taken


@functools.cache
def _formatter() -> Callable[..., Bundle]:
    """Return IPython's function from a value to its representations."""
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.pylabtools import print_figure

    formatter = DisplayFormatter()
    draw = functools.partial(print_figure, fmt="png", base64=True)
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", draw)
    return formatter.format
