"""The timeline of a run as a widget: a learner zooms into it, moves it and marks its events.

The front end gets the whole trace at once, so the view works without the kernel. `timeline.js` and
the files beside it show it.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
from IPython import get_ipython
from traitlets import Bytes, Dict, List

from ddp_kit import settings
from ddp_kit.error_text import count, name_ranks
from ddp_kit.errors import PlotError
from ddp_kit.plot.style import rank_color, text_color
from ddp_kit.plot.timeline_data import absent, unmatched
from ddp_kit.pool.ipython import cell_names
from ddp_kit.trace import Trace
from ddp_kit.trace.events import Event

if TYPE_CHECKING:
    from ddp_kit.plot import Picture

UNKNOWN, NEVER = -1, -2  # in place of a message's other side: it was dropped, or it never was


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


class TimelineWidget(anywidget.AnyWidget):
    """An interactive timeline. Where no widget can be shown, the still picture takes its place.

    picture: the still picture, whose text is also that of the widget.

    The front end gets these, which `pack` describes: `lanes`, `rows`, `calls`, `notes`.

    Raises PlotError outside a notebook.
    """

    # One module: the front end of a widget cannot import another file.
    _esm = f"const MOST_LINES = {settings.TIMELINE_LINES};\n" + "\n".join(
        _read(f"{name}.js") for name in ("timeline_words", "timeline_drawing", "timeline")
    )
    _css = _read("timeline.css")
    lanes = List().tag(sync=True)
    rows = Bytes().tag(sync=True)
    calls = List().tag(sync=True)
    notes = Dict().tag(sync=True)

    def __init__(self, picture: Picture, trace: Trace) -> None:
        if not hasattr(get_ipython(), "kernel"):
            raise PlotError("a timeline to zoom into needs a notebook: call interact() in a cell")
        # All at once: JupyterLab's server limits the rate of later updates.
        super().__init__(**pack(trace, cell_names()))
        self._picture = picture

    def __repr__(self) -> str:
        return repr(self._picture)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the widget, and the still picture for GitHub and whatever has no widgets."""
        data, metadata = super()._repr_mimebundle_(**kwargs)
        png = base64.b64encode(self._picture._repr_png_()).decode()
        return {**data, "image/png": png}, metadata


def pack(trace: Trace, cell_names: dict[str, str]) -> dict[str, Any]:
    """Return what the front end shows, the same for the same trace.

    cell_names: the notebook's name of each file in which a cell was compiled.

    lanes: for each rank, when its worker `begin`s and `end`s, how many `events` it has, by how much
        its `clock` may be wrong, and its colours. Times are nanoseconds since the first rank began.
    rows: the columns of all events, one after the other, by rank and then in the order of the
        calls: `start` (float64); `waited`, which is 0 for a call that waits itself, and `end`,
        counted from the start, NaN for None (float32); `partner` (int32), which is the row of a
        message's other side, or the number of a collective in `trace.collectives`; `call`
        (uint32), which counts in `calls`.
    calls: the different calls, each with its `name`, `kind`, `op`, `line`, `source`, `data` and
        `peer`.
    notes: what went wrong in a collective, by its number.
    """
    events = sorted(trace, key=lambda event: (event.rank, event.index))
    row = {(event.rank, event.index): number for number, event in enumerate(events)}
    lanes = _lanes(trace, events)
    zero = min(lane["begin"] for lane in lanes)
    for lane in lanes:
        lane["begin"], lane["end"] = lane["begin"] - zero, lane["end"] - zero
    partners = np.full(len(events), UNKNOWN, "<i4")
    for message in trace.messages():
        if message.recv is not None:
            send = row[message.send.rank, message.send.index]
            recv = row[message.recv.rank, message.recv.index]
            partners[send], partners[recv] = recv, send
    for key in unmatched(trace):
        partners[row[key]] = NEVER
    for number, members in enumerate(trace.collectives):
        for event in members.values():
            partners[row[event.rank, event.index]] = number
    calls: dict[tuple, int] = {}  # a training loop makes the same few again and again
    numbers = [calls.setdefault(_describe(event, cell_names), len(calls)) for event in events]
    nan = float("nan")
    columns = [
        np.array([event.start - zero for event in events], "<f8"),
        np.array([nan if e.waited is None else _begin(e) - e.start for e in events], "<f4"),
        np.array([nan if e.end is None else e.end - e.start for e in events], "<f4"),
        partners,
        np.array(numbers, "<u4"),
    ]
    rows = b"".join(column.tobytes() for column in columns)
    found = [dict(call) for call in calls]
    return {"lanes": lanes, "rows": rows, "calls": found, "notes": _notes(trace)}


def _begin(event: Event) -> int | None:
    """Return when a rank began to wait: a call that waits itself is never in the background."""
    return event.start if event.blocking and event.waited is not None else event.waited


def _lanes(trace: Trace, events: list[Event]) -> list[dict[str, Any]]:
    """Return the lane of each rank; its times are those of the trace's clock."""
    lanes = []
    for rank, span in enumerate(trace.spans):
        own = [event for event in events if event.rank == rank]
        times = (moment for event in own for moment in (event.start, event.waited, event.end))
        moments = [*span, *(moment for moment in times if moment is not None)]
        color = rank_color(rank)
        clock = trace.clock_error[rank] if trace.clock_error else 0
        lane = {"begin": min(moments), "end": max(moments), "events": len(own), "clock": clock}
        lanes.append(lane | {"color": color, "ink": text_color(color)})
    return lanes


def _describe(event: Event, cell_names: dict[str, str]) -> tuple[tuple[str, Any], ...]:
    line, where = "", event.where
    if where is not None:
        file = cell_names.get(where.file, where.file)
        line = f"{file}, line {where.line}, in {where.function}"
    data = [count(event.nbytes, "byte")]
    if event.dtype:
        data.append(f"{event.dtype} {list(event.shape)}")
    data += [part for part in (event.reduce_op, "on a GPU" * (event.device != "cpu")) if part]
    return (
        ("name", event.call),
        ("op", event.op),
        ("kind", event.kind),
        ("line", line),
        ("source", where.source if where is not None else ""),
        ("data", ", ".join(data)),
        ("peer", event.peer),
    )


def _notes(trace: Trace) -> dict[str, str]:
    notes = {}
    for number, members in enumerate(trace.collectives):
        found = []
        if missing := absent(trace, members):
            found.append(f"{name_ranks(missing)} did not call it.")
        if len({event.method for event in members.values()}) > 1:
            found.append("The ranks called different collectives.")
        if found:
            notes[str(number)] = " ".join(text[0].upper() + text[1:] for text in found)
    return notes
