"""The interactive timeline: what the front end gets, and what stands where it cannot be shown."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import traces

import ddp_kit as kit
from ddp_kit.notebook.timeline import NEVER, UNKNOWN, pack

MS = traces.MS
COLUMNS = [("start", "<f8"), ("waited", "<f4"), ("end", "<f4"), ("partner", "<i4"), ("call", "<u4")]


def columns(state):
    """Read the rows as the front end does."""
    count = sum(lane["events"] for lane in state["lanes"])
    found, at = {}, 0
    for name, kind in COLUMNS:
        found[name] = np.frombuffer(state["rows"], kind, count, at)
        at += found[name].nbytes
    assert at == len(state["rows"])
    return found


def test_rows_are_the_events_by_rank_and_call():
    script = traces.Script(2)
    script.compute(1, 3)
    script.recv(1, 0, 0.3, tag=7)
    script.send(1, 0, tag=7)
    script.collective("all_reduce")
    state = pack(script.trace(), {"Cell In[1]": "Cell In[9]"})
    rows = columns(state)
    assert [lane["events"] for lane in state["lanes"]] == [2, 2]
    assert rows["start"] / MS == pytest.approx([1, 4.1, 4, 4.3])
    assert rows["waited"].tolist() == [0, 0, 0, 0]
    assert rows["end"] / MS == pytest.approx([3, 1.2, 0.2, 1.0])
    assert rows["partner"].tolist() == [2, 0, 0, 0]  # rows of the message; the first collective
    first = state["calls"][rows["call"][0]]
    assert first == {
        "name": "recv(src=1, tag=7)",
        "op": "recv",
        "kind": "recv",
        "line": "Cell In[9], line 3, in worker",
        "source": "dist.recv(x)",
        "data": "4,096 bytes, float32 [32, 32]",
        "peer": 1,
    }
    assert rows["call"][1] == rows["call"][3]


def test_times_begin_with_the_first_rank_and_missing_ones_are_nan():
    trace = traces.broken(3)
    state = pack(trace, {})
    assert min(lane["begin"] for lane in state["lanes"]) == 0
    rows = columns(state)
    events = list(trace)
    assert [math.isnan(end) for end in rows["end"]] == [event.end is None for event in events]
    ring = columns(pack(traces.ring(3, 1), {}))
    assert [math.isnan(waited) for waited in ring["waited"]] == [False, True] * 3


def test_a_call_that_waits_itself_is_never_in_flight():
    trace = traces.program("send 1, isend 1 a, wait a", "recv 0, recv 0")
    waited = columns(pack(trace, {}))["waited"]
    assert list(waited[:1]) == [0]  # though some time passed between the call and its wait
    assert waited[1] > 0
    assert trace.events[0].waited > trace.events[0].start


def test_an_end_that_never_was_differs_from_one_that_is_not_known():
    state = pack(traces.broken(3), {})
    rows = columns(state)
    kinds = [state["calls"][number]["kind"] for number in rows["call"]]
    lost = [kinds[i] for i in range(len(kinds)) if rows["partner"][i] == NEVER]
    assert lost == ["recv", "send"]
    assert state["notes"] == {"0": "Rank 0 did not call it."}
    script = traces.Script(2)
    script.recv(0, 1, 0.3)
    dropped = pack(script.trace(dropped=(1, 0)), {})
    assert columns(dropped)["partner"].tolist() == [UNKNOWN]


def test_ranks_that_called_different_collectives_are_noted():
    script = traces.Script(2)
    script.add(0, "all_reduce", "collective", None)
    script.add(1, "barrier", "collective", None)
    assert pack(script.trace(), {})["notes"] == {"0": "The ranks called different collectives."}


def test_hosts_say_how_wrong_their_clocks_may_be():
    state = pack(traces.pipeline(2), {})
    assert [lane["clock"] for lane in state["lanes"]] == [0, 0]
    state = pack(replace(traces.pipeline(2), clock_error=(0, 900)), {})
    assert [lane["clock"] for lane in state["lanes"]] == [0, 900]


def test_interact_outside_a_notebook_is_refused():
    picture = kit.plot.timeline(traces.pipeline(2))
    with pytest.raises(kit.PlotError, match=r"needs a notebook: call interact\(\) in a cell$"):
        picture.interact()
