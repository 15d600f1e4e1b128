"""What runs show below a cell: the live view, which is empty at the end, and what they display."""

from __future__ import annotations

import functools
import importlib
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display

from ddp_kit import errors, settings
from ddp_kit.error_text import name_ranks
from ddp_kit.pool import end_all, live_view
from ddp_kit.pool.live_view import RankLine, format_progress, heading, in_short
from ddp_kit.pool.pool import start_after_cell
from ddp_kit.pool.result import beside_rank
from ddp_kit.pool.wire.messages import Bundle

_OLD = settings.LIVE_VIEW_OLD_AFTER
STALE = f"(not updated for {_OLD} s: the kernel was restarted, or the page was opened again)"


class NotebookView(live_view.LiveView):
    """A display that shows what each rank does; it begins and ends empty.

    nbval compares what a display showed first, and the saved notebook contains what it showed
    last. Both are empty, so the live view affects neither. All runs of one cell share one display.
    """

    _cell: str | None = None  # the message that requested the cell in which _handle was created
    _handle = None
    _shown: tuple[str, Sequence[RankLine]] | None = None

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        cell = get_ipython().get_parent().get("header", {}).get("msg_id")
        if cell != NotebookView._cell or NotebookView._handle is None:
            NotebookView._cell = cell
            NotebookView._handle = display({}, raw=True, display_id=True)

    def update(self, lines: Sequence[RankLine]) -> None:
        """Show what each rank is doing below a heading, as a table, and in short as text."""
        _load_pictures()
        title = heading(self._world_size, lines, int(time.monotonic() - self._opened))
        if (title, lines) != self._shown:
            self._shown = title, lines
            both = {"text/html": as_table(title, lines), "text/plain": in_short(lines)}
            self._handle.update(both, raw=True)

    def close(self) -> None:
        if self._shown:
            self._shown = None
            self._handle.update({}, raw=True)


def as_table(title: str, lines: Sequence[RankLine]) -> str:
    """Return a table as HTML without scripts, which every front end shows.

    Each update starts the animation anew. A page that gets none any more shows that it is old.
    """
    table = "".join(_row(name, line) for name, line in live_view.rows(lines))
    style = "@keyframes ddp-kit-old { to { visibility: visible } }"
    old = f'<em style="visibility: hidden; animation: ddp-kit-old 0s {_OLD}s forwards">{STALE}</em>'
    return f"<style>{style}</style><div>{title} {old}</div><table>{table}</table>"


def _row(name: str, line: RankLine) -> str:
    done, total = line.progress or (0, None)
    bar = f'<progress value="{done}" max="{total}"></progress>' if total else ""
    number = format_progress(done, total) if line.progress else ""
    # Only what was printed may wrap, else the table would change its height all the time.
    cells = [_unbroken(str(line)), bar, _unbroken(number), f"<samp>{escape(line.newest)}</samp>"]
    # Front ends align cells to the right, as for numbers.
    aligned = "".join(f'<td><div align="left">{cell}</div></td>' for cell in cells)
    return f"<tr><th>{_unbroken(name)}</th>{aligned}</tr>"


def _unbroken(text: str) -> str:
    return escape(text).replace(" ", "&nbsp;")


def show_displayed(displayed: Mapping[int, Sequence[Bundle]]) -> None:
    """Show it in rank order: text beside its heading, what looks the same on several ranks once."""
    ranks: dict[tuple[str, int], list[int]] = {}
    for rank, bundles in displayed.items():
        for look in _looks(bundles):
            ranks.setdefault(look, []).append(rank)
    for rank, bundles in displayed.items():
        for (data, metadata), look in zip(bundles, _looks(bundles), strict=True):
            if set(data) == {"text/plain"}:
                print(beside_rank(rank, str(data["text/plain"])))
            elif ranks[look][0] == rank:
                print(f"{name_ranks(ranks[look])}:")
                display(data, metadata=metadata, raw=True)


def _looks(bundles: Sequence[Bundle]) -> Iterator[tuple[str, int]]:
    """Yield how each bundle looks, and how many up to it look so."""
    seen: Counter[str] = Counter()
    for data, _ in bundles:
        # The text of a figure or a table may contain an address.
        look = repr(sorted((kind, value) for kind, value in data.items() if kind != "text/plain"))
        seen[look] += 1
        yield look, seen[look]


@functools.cache
def _load_pictures() -> None:
    """Import what draws a deadlock as soon as a run takes a while, else the error waits for it."""
    load = functools.partial(importlib.import_module, "ddp_kit.plot")
    threading.Thread(target=load, name="ddp_kit loads its pictures", daemon=True).start()


def _draw_waits(error: errors.DeadlockError) -> None:
    from ddp_kit import plot  # matplotlib takes its time

    display(plot.waits(error))


def _explain_run(result: Any) -> None:
    """Print where the options of a program belong if `%run -m` has taken them for its own."""
    module = re.search(r"^\s*%run\b.* -m\s*(\S+)", result.info.raw_cell or "", re.MULTILINE)
    if module and isinstance(result.error_in_exec, UsageError):
        print(f"Options of the program come after --: %run -m {module[1]} -- --world-size 3")


def take_over() -> None:
    """Show the runs of this process in the notebook, and start the first ranks."""
    # `%run -m` of a lesson that a cell has imported is fine; runpy warns about it on stderr.
    warnings.filterwarnings("ignore", r"'ddp_kit\.lessons\.\w+' found in sys\.modules")
    live_view.use(live_view.View(show_displayed=show_displayed))
    get_ipython().events.register("post_run_cell", _explain_run)
    if hasattr(get_ipython(), "kernel"):  # IPython in a terminal has a terminal's live view
        most = settings.OUTPUT_LINES_SHOWN, settings.OUTPUT_CHARACTERS_SHOWN
        live_view.use(live_view.View(NotebookView, show_displayed, _draw_waits, *most))
        get_ipython().observe(lambda change: end_all(change["new"]), "exit_now")
        start_after_cell()
