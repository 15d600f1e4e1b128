"""Pictures look dark where JupyterLab has a dark theme. In the notebook's file they stay white."""

from __future__ import annotations

import functools
from typing import Any

from ddp_kit.pool.ipython import has_front_end

INVERTED = "jp-needs-light-background"  # JupyterLab's class of an image with the metadata below
# White becomes as dark as JupyterLab, and turning the hues back keeps a rank's colour.
CSS = f'[data-jp-theme-light="false"] img.{INVERTED} {{ filter: invert(0.93) hue-rotate(180deg) }}'


def mark(picture: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a picture's output has besides its data: metadata, in JupyterLab."""
    if not has_front_end():
        return {}, {}
    _add_style()
    return {}, {"needs_background": "light"}


@functools.cache
def _add_style() -> Any:
    """Add the style to the page, by a widget that is never shown and so is in no output."""
    import anywidget  # slow to load

    class Style(anywidget.AnyWidget):
        _esm = "export default {}"
        _css = CSS

    return Style()
