"""The file for Perfetto: it loads, it is sorted, and every arrow has both ends."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import pytest
import traces

from ddp_kit.trace import Trace
from ddp_kit.trace.trace_files import write_chrome

EXAMPLES = {
    "pipeline": traces.pipeline(3),
    "ring": traces.ring(4, rounds=3),
    "deadlock": traces.broken(4),
    "without spans": replace(traces.mixed(2, 3), spans=()),
    "empty": Trace(2),
}


def written(trace, folder):
    path = folder / "trace.json"
    assert write_chrome(trace, path) is None
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


@pytest.fixture(params=EXAMPLES.values(), ids=EXAMPLES.keys())
def example(request):
    return request.param


def test_names_come_first_and_then_rising_times_from_zero(example, tmp_path):
    found = written(example, tmp_path)
    kinds = [event["ph"] == "M" for event in found]
    assert kinds == sorted(kinds, reverse=True)
    times = [event["ts"] for event in found if event["ph"] != "M"]
    assert times == sorted(times)
    assert not times or times[0] == 0
    assert all(event["dur"] >= 0 for event in found if event["ph"] == "X")


def test_arrows_lead_from_a_send_to_its_receive(example, tmp_path):
    found = written(example, tmp_path)
    ends = {kind: {e["id"]: e for e in found if e["ph"] == kind} for kind in "sf"}
    matched = [message for message in example.messages() if message.recv]
    assert set(ends["s"]) == set(ends["f"])
    assert len(ends["s"]) == len(matched)
    slices = [event for event in found if event["ph"] == "X" and event["tid"] > 0]
    for number, start in ends["s"].items():
        end = ends["f"][number]
        assert end["bp"] == "e"
        for arrow, kind in ((start, "send"), (end, "recv")):
            around = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"])
                and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]
            ]
            assert [s["args"]["kind"] for s in around] == [kind]


def test_slices_of_a_thread_lie_beside_or_inside_each_other(example, tmp_path):
    threads = defaultdict(list)
    for event in written(example, tmp_path):
        if event["ph"] == "X":
            # whole nanoseconds: sums of floats differ in their last digit
            begin = round(1000 * event["ts"])
            threads[event["pid"], event["tid"]].append(
                (begin, begin + round(1000 * event["dur"]), event["name"])
            )
    for spans in threads.values():
        for i, (begin, end, _) in enumerate(spans):
            for other, until, _ in spans[i + 1 :]:
                assert other >= end or (begin <= other and until <= end)


def test_operation_shows_its_tag_bytes_shape_and_line(tmp_path):
    script = traces.Script(2)
    script.message(0, 1, tag=7)
    found = written(script.trace(), tmp_path)
    send = next(event for event in found if event["name"] == "send")
    assert send["args"] == {
        "kind": "send",
        "group": [0, 1],
        "dst": 1,
        "tag": 7,
        "bytes": 4096,
        "shape": [32, 32],
        "dtype": "float32",
        "line": "line 3 of worker: dist.send(x)",
    }
    assert (send["ts"], send["dur"]) == (1000, 200)


def test_wait_that_never_ended_lasts_as_long_as_its_rank(tmp_path):
    found = written(traces.broken(4), tmp_path)
    stuck = next(e for e in found if e["name"] == "wait for recv" and e["pid"] == 0)
    worker = next(e for e in found if e["name"] == "worker" and e["pid"] == 0)
    assert stuck["args"]["ended"] == "never"
    assert stuck["ts"] + stuck["dur"] == pytest.approx(worker["ts"] + worker["dur"])
