"""Pictures of traces: order and time, bytes, wait-for graphs, buckets."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import matplotlib
import matplotlib.style
import numpy as np
import pytest
import traces
from matplotlib.colors import to_hex
from matplotlib.patches import Circle, FancyArrowPatch

from ddp_kit.error_text import Frame
from ddp_kit.errors import PlotError
from ddp_kit.plot import buckets, messages, rank_color, timeline, waits
from ddp_kit.plot.style import LOST, edge_color
from ddp_kit.plot.timeline import shares
from ddp_kit.plot.timeline_data import by_steps, by_time
from ddp_kit.trace import Trace
from ddp_kit.trace.events import Group

MS, NONE, TIMES = traces.MS, "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"


def wait(rank, op, *peers, line=4):
    where = Frame("Cell In[1]", line, "worker", "x", True)
    return SimpleNamespace(rank=rank, op=op, where=where, peers=peers)


def deadlock(*stuck, returned=()):
    return SimpleNamespace(waits=stuck, returned=returned)


def ring_deadlock(n):
    return deadlock(*(wait(r, f"recv(src={(r - 1) % n})", (r - 1) % n) for r in range(n)))


def ddp(*backwards):
    """A rank whose backwards have buckets of (ready, reduced) ms, and ms until it waited."""
    script = traces.Script(1)
    for spans, until in backwards:
        zero = script.now[0]
        for ready, reduced in spans:
            script.now[0] = zero + ready * MS
            last = (ready, reduced) == spans[-1]
            times = {"waited": zero + until * MS if last else None}
            times["end"] = None if reduced is None else zero + reduced * MS
            event = script.add(0, "DDP all_reduce", "collective", None, nbytes=1_000_000)
            script.events[0][event.index] = replace(event, **times)
        script.now[0] = zero + 100 * MS
    return script.trace()


def thirty():
    """A loop of 30 all_reduces."""
    script = traces.Script(4)
    for _ in range(30):
        script.collective("all_reduce")
    return script.trace()


def irregular(n, rounds):
    """As `traces.mixed`, but no round repeats another one."""
    script = traces.Script(n)
    for number in range(rounds):
        for rank in range(n):
            script.compute(rank, 2 if rank == 1 else 0.7)
        for rank in range(n):
            script.send(rank, (rank + 1) % n, tag=number)
        for rank in range(n):
            script.recv((rank - 1) % n, rank, 0.3, tag=number)
        script.collective("all_reduce", inputs=((number,),))
    return script.trace()


def training(n, steps=20, buckets=8, pause=0, late=0):
    """A run of DDP: its ranks start late, compute in each step, and end with a barrier.

    The gradients of the first step are in one bucket. pause: ms before the first call of every
    rank, and as many after the last one. late: ms until the last rank comes to its first call.
    """
    script = traces.Script(n)
    for rank in range(n):
        script.compute(rank, pause + (late if rank == n - 1 else 0))
    script.collective("DDP broadcast", where=line(1))
    for step in range(steps):
        for rank in range(n):
            script.compute(rank, 3 + rank + (step == 7) * 20)
        for bucket in range(buckets if step else 1):
            last = bucket + 1 == (buckets if step else 1)
            if last:
                script.collective("DDP all_reduce", where=line(2), inputs=((bucket, step > 0),))
            else:
                for rank in range(n):
                    given = {"waited": None, "inputs": ((bucket, step > 0),), "where": line(2)}
                    script.add(rank, "DDP all_reduce", "collective", 1, **given)
    script.collective("barrier", where=line(3))
    for rank in range(n):
        script.compute(rank, pause)
    return script.trace()


def line(number):
    return Frame("Cell In[1]", number, "worker", f"line {number}", True)


def one_of_each(n):
    return [
        timeline(traces.mixed(n, 3)),
        timeline(traces.mixed(n, 3), timed=True),
        timeline(traces.broken(n)),
        timeline(irregular(n, 60)),
        timeline(training(n)),
        timeline(training(n), timed=True),
        messages(traces.mixed(n, 3)),
        waits(ring_deadlock(n)),
        buckets(ddp(([(0, 3), (2, 6)], 4))),
        buckets(ddp(([(0, 3), (2, 6)], 4)), began=4 * MS),
    ]


def texts(picture):
    return [text.get_text() for ax in picture.axes for text in ax.texts]


def arrows(picture):
    """Return (begin, end, colour) of every arrow of a timeline or a graph."""
    return [
        (*patch._posA_posB, to_hex(patch.get_edgecolor()))
        for ax in picture.axes
        for patch in ax.patches
        if isinstance(patch, FancyArrowPatch)
    ]


# ---- the figure


def test_same_trace_gives_the_same_bytes_and_text_in_a_dark_style_too_and_rcparams_stay():
    def drawn():
        return [(picture._repr_png_(), repr(picture)) for picture in one_of_each(2)]

    light = drawn()
    with matplotlib.rc_context():
        matplotlib.style.use(["ggplot", "dark_background"])
        matplotlib.rcParams["hatch.color"] = "red"
        before = dict(matplotlib.rcParams)
        assert drawn() == light
        assert dict(matplotlib.rcParams) == before


def test_pictures_of_sixteen_ranks_fit_a_notebook():
    for picture in one_of_each(16):
        assert picture.get_size_inches()[0] <= 9.03
        assert len(picture._repr_png_()) < 90_000


# ---- timeline


def test_logical_table_shows_how_long_a_call_lasts_and_what_takes_no_step():
    assert repr(timeline(traces.program(*traces.TREE[:3], "send 2", "send 0"))) == (
        "4 messages on 5 ranks, step by step\n"
        "step  rank 0    rank 1    rank 2    rank 3    rank 4\n"
        "1     recv ← 1  send → 0  recv ← 3  send → 2  send → 0\n"
        "2     recv ← 2            send → 0            …\n"
        "3     recv ← 4                                …"
    )
    later = traces.program(
        "isend 1 a, recv 1, wait a, all_reduce b, all_reduce c, wait b, wait c",
        "irecv 0 a, send 0, wait a, all_reduce b, all_reduce c, wait b, wait c",
    )
    assert repr(timeline(later)).split("\n")[1:] == [
        "step  rank 0                     rank 1",
        "1     isend → 1, recv ← 1, wait  irecv ← 0, send → 0, wait",
        f"2     all_reduce {TIMES} 2, wait       all_reduce {TIMES} 2, wait",
        "3     wait                       wait",
    ]


def test_arrow_leads_from_send_to_receive_in_the_senders_colour():
    drawn = arrows(timeline(traces.pipeline(2, batches=1)))
    assert len(drawn) == 1
    assert 0.5 < drawn[0][0][0] < drawn[0][1][0] < 1.5  # within the one step it takes
    (begin, end, color) = drawn[0]
    assert 0 < begin[1] < end[1] < 1
    assert color == edge_color(0)


def test_unmatched_ends_are_dashed_and_say_so():
    picture = timeline(traces.broken(4))
    assert [color for *_, color in arrows(picture)].count(LOST) == 2
    shown = " ".join(texts(picture))
    assert "never received" in shown
    assert "never sent" in shown
    assert "recv ← 3 (never sent)" in repr(picture)
    assert "send → 0 (never received)" in repr(picture)
    assert repr(picture).count("barrier (without 0)") == 3
    dashed = [line for line in picture.axes[1].lines if line.get_linestyle() == "--"]
    assert len(dashed) == 1  # the barrier
    assert "barrier, without rank 0" in texts(picture)


def test_what_was_dropped_is_not_called_missing():
    trace = traces.broken(4)
    picture = timeline(replace(trace, dropped=(5, 0, 0, 5)))
    assert "never" not in repr(picture)
    assert "without" not in repr(picture)
    assert LOST not in [color for *_, color in arrows(picture)]
    assert "The 10 oldest events were dropped" in " ".join(texts(picture))


def test_a_call_is_as_long_as_the_steps_before_its_other_side():
    lanes = by_steps(traces.pipeline(3, batches=1))
    spans = {(bar.rank, bar.op): (bar.begin, bar.end) for bar in lanes.bars}
    assert spans[0, "send"] == (0.5, 1.5)
    assert spans[2, "recv"] == (0.5, 2.5)
    assert spans[0, "all_reduce"] == (1.5, 3.5)
    lanes = by_steps(traces.program(*traces.TREE))
    sends = {bar.rank: (bar.begin, bar.end) for bar in lanes.bars if bar.op == "send"}
    assert sends == {1: (0.5, 1.5), 2: (1.5, 2.5), 3: (0.5, 1.5), 4: (0.5, 3.5)}
    (arrow,) = (arrow for arrow in lanes.arrows if arrow.src == 4)
    assert 0.5 < arrow.begin < 1 < 3 < arrow.end < 3.5  # from the call until it is received


def test_what_is_started_is_a_thin_line_until_it_is_complete():
    trace = traces.program("isend 1 a, recv 1, wait a", "irecv 0 a, wait a, send 0")
    for lanes in (by_steps(trace), by_time(trace)):
        flights = {each.op: each for each in lanes.flights}
        bars = {(bar.rank, bar.op): bar for bar in lanes.bars}
        assert flights.keys() == {"isend", "irecv"}
        assert None not in {each.wait for each in lanes.flights}
        assert bars[1, "irecv"].waits
        assert not bars[0, "recv"].waits
    # In steps: the message is over before rank 0 waits for it, so that wait is no bar.
    lanes = by_steps(trace)
    assert [(f.op, f.begin, f.end, f.wait) for f in lanes.flights] == [
        ("isend", 0.5, 1.5, 2.5),
        ("irecv", 0.5, 1.5, 0.75),
    ]
    assert [(bar.op, bar.begin, bar.end) for bar in lanes.bars if bar.rank == 1] == [
        ("irecv", 0.75, 1.5),  # there is room before it for its call
        ("send", 1.5, 2.5),
    ]
    assert (0, "isend") not in {(bar.rank, bar.op) for bar in lanes.bars}


def sent_early(**given):
    """Rank 0 starts a send at 1 ms and waits for it from 3 to 9 ms; rank 1 has it after 8 ms."""
    script, zero = traces.Script(2), 4 * MS
    send = script.add(0, "isend", "send", peer=1, blocking=False)
    recv = script.add(1, "irecv", "recv", peer=0, blocking=False)
    times = {"start": zero + 1 * MS, "waited": zero + 3 * MS, "end": zero + 9 * MS}
    script.events[0] = [replace(send, **times | given)]
    script.events[1] = [replace(recv, start=zero + 2 * MS, waited=zero + 8 * MS, end=zero + 8 * MS)]
    script.now = [zero + 9 * MS] * 2
    return script.trace()


@pytest.mark.parametrize("given", [{}, {"end": None}, {"waited": None, "end": None}])
def test_send_is_complete_when_its_message_is_received(given):
    sent, received = by_time(sent_early(**given)).flights
    assert (sent.op, sent.begin, sent.end) == ("isend", 1, 8)
    assert sent.wait == (None if "waited" in given else 3)
    assert (received.op, received.begin, received.end, received.wait) == ("irecv", 2, 8, 8)


@pytest.mark.parametrize("timed", [False, True], ids=["order", "time"])
def test_arrow_between_calls_that_return_at_once_joins_their_lines(timed):
    picture = timeline(sent_early(), timed=timed)
    ((begin, end, _),) = arrows(picture)
    sent, received = markers(picture, "o")
    assert begin == (sent.get_xdata()[0], sent.get_ydata()[0])
    assert end[1] == received.get_ydata()[0] > 1.27  # below the bars of rank 1
    assert end[0] == pytest.approx({False: 1.5, True: 8}[timed], rel=0.01)


def markers(picture, marker):
    return [line for line in picture.axes[1].lines if line.get_marker() == marker]


@pytest.mark.parametrize("timed", [False, True], ids=["order", "time"])
def test_every_wait_has_a_mark_of_its_own(timed):
    trace = traces.program("isend 1 a, isend 1 b, wait a", "recv 0, recv 0")
    picture = timeline(trace, timed=timed)
    (waits,), (calls,) = markers(picture, "D"), markers(picture, "o")
    assert (len(calls.get_xdata()), len(waits.get_xdata())) == (2, 1)  # nobody waits for b
    assert waits.get_xdata()[0] > calls.get_xdata()[0]
    assert "complete. \N{BLACK DIAMOND}:\xa0its\xa0wait()." in " ".join(texts(picture))
    assert not markers(timeline(traces.program("send 1", "recv 0"), timed=timed), "D")


def test_collective_is_a_line_through_its_ranks_alone():
    script = traces.Script(4)
    script.collective("all_reduce", ranks=(1, 3), group=Group("1", (1, 3)))
    line = timeline(script.trace()).axes[1].lines[0]
    assert list(line.get_ydata()) == [1, 3]
    assert list(line.get_xdata()) == [1, 1]
    assert line.get_linestyle() == "-"


def test_collectives_that_differ_are_named_both():
    script = traces.Script(2)
    script.add(0, "all_reduce", "collective", None)
    script.add(1, "broadcast", "collective", None)
    assert "all_reduce ≠ broadcast" in texts(timeline(script.trace()))


def test_collectives_that_are_close_share_a_name():
    picture = timeline(thirty())
    assert [text for text in texts(picture) if "all_reduce" in text] == [f"all_reduce {TIMES} 30"]
    assert "A bracket joins collectives with the same name." in " ".join(texts(picture))
    script = traces.Script(2)
    for _ in range(5):
        script.collective("all_reduce")
    assert texts(timeline(script.trace())).count("all_reduce") == 5


def test_timed_bars_are_milliseconds_since_the_first_rank_began():
    picture = timeline(traces.pipeline(2, batches=1), timed=True)
    assert picture.axes[1].get_xlabel() == "time since the first rank began (ms)"
    lanes = by_time(traces.pipeline(2, batches=1))
    send = next(bar for bar in lanes.bars if bar.op == "send")
    assert (send.begin, send.end) == pytest.approx((2.0, 2.2))
    assert lanes.spans[0][0] == 0
    assert repr(picture) == (
        "1 message and 2 collectives on 2 ranks, in time (ms)\n"
        "        not in a call  in sends  in receives  in collectives   all\n"
        "rank 0           3.30     0.200            0            3.10  6.60\n"
        "rank 1           3.30         0         1.30            2.00  6.60"
    )


@pytest.mark.parametrize("timed", [False, True], ids=["order", "time"])
def test_only_in_time_is_a_rank_in_no_call(timed):
    picture = timeline(traces.program(*traces.TREE), timed=timed)
    assert ("not in a call" in texts(picture)) == timed
    lanes = [each.get_paths()[0].get_extents().height for each in picture.axes[1].collections[:5]]
    assert all((height > 0.1) == timed for height in lanes)  # else a hairline


def test_table_of_a_training_run_lists_the_calls_of_one_step():
    assert repr(timeline(training(2, steps=20, buckets=3))) == (
        "60 collectives on 2 ranks in 20 training steps, step by step\n"
        "step  rank 0              rank 1\n"
        f"1     DDP all_reduce {TIMES} 3  DDP all_reduce {TIMES} 3\n"
        "2     …                   …\n"
        "3     …                   …\n"
        "Training step 2 of 20."
    )


def test_step_that_is_asked_for_is_shown():
    trace = training(2, steps=20, buckets=3)
    for step, number in ((0, 1), (19, 20), (-1, 20)):
        picture = timeline(trace, step=step)
        assert repr(picture).endswith(f"Training step {number} of 20.")
        assert (f"DDP all_reduce {TIMES} 3" in repr(picture)) == (step != 0)
    picture = timeline(trace, timed=True, step=7)  # the slow one
    assert picture.axes[1].get_xlabel() == "time since this training step began (ms)"
    assert picture.axes[1].get_xlim()[1] > 20


@pytest.mark.parametrize("timed", [False, True], ids=["order", "time"])
def test_training_run_that_never_ended_shows_its_end(timed):
    trace = training(2, steps=20, buckets=3)
    stuck = [replace(event, end=None) for event in trace if event.op == "barrier"][:1]
    ended = [event for event in trace if event.op != "barrier"]
    picture = timeline(replace(trace, events=(*ended, *stuck)), timed=timed)
    assert repr(picture).endswith("After training step 20, the last that was completed.")
    assert "barrier, without rank 1" in texts(picture)
    assert "DDP all_reduce" not in repr(picture)
    assert ("barrier (without 1)" in repr(picture)) == (not timed)


def test_step_is_not_the_first_if_others_have_the_same_calls():
    shown = "Training step 2 of 20"
    assert shown in repr(timeline(traces.mixed(2, 20)))


def test_short_training_and_a_loop_of_one_collective_are_drawn_whole():
    for trace in (training(2, steps=4, buckets=3), thirty()):
        assert "training step" not in repr(timeline(trace))


# ---- pauses


def limits(picture):
    return picture.axes[1].get_xlim()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pause": 5_000}, "s (no call) and the last 5.00 s (no call)."),
        ({"late": 5_000}, "s (2 calls)."),
    ],
)
def test_long_pauses_and_waits_for_a_late_rank_are_cut_off_and_the_caption_says_so(given, said):
    picture = timeline(training(3, steps=4, buckets=3, **given), timed=True)
    begin, end = limits(picture)
    assert 4_900 < begin < 5_001
    assert end - begin < 100
    assert "Not shown: the first " in repr(picture)
    assert said in " ".join(texts(picture))
    assert said in repr(picture)


def test_pauses_within_a_run_and_ranks_that_are_late_every_time_stay():
    for rounds, rank, pause in ((2, 1, 300), (30, 2, 100)):
        script = traces.Script(4)
        for _ in range(rounds):
            script.collective("all_reduce")
            script.compute(rank, pause)
        script.collective("all_reduce")
        picture = timeline(script.trace(), timed=True)
        assert limits(picture)[0] == 0
        assert "Not shown" not in repr(picture)


def test_thousands_of_events_are_shares_and_the_table_is_one_row_a_rank():
    picture = timeline(irregular(4, 100))
    assert "Too many events to draw one by one" in " ".join(texts(picture))
    assert arrows(picture) == []
    assert repr(picture).split("\n")[:3] == [
        "400 messages and 100 collectives on 4 ranks, step by step",
        "        sends  bytes sent  receives  collectives  steps waited",
        "rank 0    100     409,600       100          100             0",
    ]


def test_more_than_240_collectives_are_many():
    def said(rounds, *ops):
        script, draw = traces.Script(3), random.Random(0)
        for _ in range(rounds):
            script.collective(draw.choice(ops))
        return " ".join(texts(timeline(script.trace(), timed=True)))

    mixed = "barrier", "all_reduce", "broadcast"
    assert "Too many events" not in said(240, *mixed)
    assert "Too many events" in said(241, *mixed)
    assert f"barrier {TIMES} 240" in said(240, "barrier")


def test_shares_of_a_bin_add_up_to_the_time_spent():
    lanes = by_time(traces.mixed(2, 100))
    edges = np.linspace(*lanes.limits, 61)
    found = shares(lanes, edges)
    spent = sum(bar.end - bar.begin for bar in lanes.bars if bar.rank == 0)
    assert found[0].sum() * (edges[1] - edges[0]) == pytest.approx(spent)
    assert found.min() >= 0
    assert found.sum(axis=1).max() <= 1 + 1e-9


# ---- messages


def test_messages_table_has_exact_bytes_and_sums():
    script = traces.Script(2)
    script.message(0, 1, nbytes=1_000_000)
    script.message(0, 1, nbytes=24)
    script.collective("barrier")
    picture = messages(script.trace())
    assert repr(picture) == (
        "Who sent how many bytes to whom, in 2 messages\n"
        "from \\ to  rank 0     rank 1        all\n"
        f"rank 0          {NONE}  1,000,024  1,000,024\n"
        f"rank 1          {NONE}          {NONE}          0\n"
        "all             0  1,000,024  1,000,024\n"
        "Rows: senders; columns: receivers; bytes of the tensors that were sent. "
        "1 collective is not included."
    )
    assert texts(picture).count("1 MB") == 4
    assert texts(picture).count("0 B") == 2


def test_hosts_are_separated_by_heavy_lines():
    trace = traces.ring(6, 1)
    for per_host, borders in ((None, 0), (2, 2), (4, 1), (6, 0)):
        lines = [line for ax in messages(trace, per_host=per_host).axes for line in ax.lines]
        heavy = [line for line in lines if line.get_linewidth() >= 1.8]
        assert len(heavy) == 2 * borders
    assert "Heavy lines separate hosts of at most 4 ranks;" in repr(messages(trace, per_host=4))
    assert "Heavy lines" not in repr(messages(trace))
    sent = sum(message.nbytes for message in trace.messages())
    assert (
        f"Heavy lines separate hosts of 3 ranks each; {sent // 3:,} of {sent:,} bytes went from "
        "host to host." in repr(messages(trace, per_host=3))
    )


def test_message_of_no_bytes_is_not_no_message():
    script = traces.Script(2)
    script.message(0, 1, nbytes=0)
    script.send(0, 1, nbytes=0)
    picture = messages(script.trace())
    assert texts(picture).count("0 B") == 1 + 5
    assert "1 message was never received." in repr(picture)


# ---- waits


def test_waits_table_names_the_cycle():
    picture = waits(deadlock(wait(0, "recv(src=1)", 1), wait(1, "recv(src=0)", 0, line=7)))
    assert repr(picture) == (
        "Ranks 0 and 1 wait for each other\n"
        "        is in        waits for  line\n"
        "rank 0  recv(src=1)  1          4\n"
        "rank 1  recv(src=0)  0          7\n"
        "cycle: 0 → 1 → 0"
    )
    assert {color for *_, color in arrows(picture)} == {LOST}
    assert {"recv(src=1)", "recv(src=0)", "line 4", "line 7"} <= set(texts(picture))


def test_rank_that_returned_is_grey_and_to_blame():
    picture = waits(deadlock(wait(0, "recv(src=1)", 1), wait(1, "all_reduce()", 2), returned=(2,)))
    fills = [to_hex(p.get_facecolor()) for p in picture.axes[0].patches if isinstance(p, Circle)]
    assert fills == [rank_color(0), rank_color(1), "#dcdcdc"]
    assert repr(picture).startswith("Rank 1 waits for rank 2, which had returned\n")
    assert "cycle" not in repr(picture)
    assert [color == LOST for *_, color in arrows(picture)] == [False, True]


def test_receive_from_any_source_is_dashed():
    stuck = [wait(0, "recv()", 1, 2), wait(1, "barrier()", 0, 2), wait(2, "barrier()", 0, 1)]
    picture = waits(deadlock(*stuck))
    drawn = [p.get_linestyle() for p in picture.axes[0].patches if isinstance(p, FancyArrowPatch)]
    assert [style not in ("-", "solid") for style in drawn] == [True, True] + [False] * 4
    assert "Dashed: any one of these would do." in " ".join(texts(picture))


# ---- buckets


def test_buckets_table_shows_what_is_hidden():
    assert repr(buckets(ddp(([(0, 3), (2, 6)], 4)))) == (
        "DDP backward on rank 0: 29% of all_reduce hidden behind computing\n"
        "              bytes  ready (ms)  reduced (ms)  hidden (ms)  not hidden (ms)\n"
        "bucket 0  1,000,000           0          3.00         2.00             1.00\n"
        "bucket 1  1,000,000        2.00          6.00            0             4.00\n"
        "Backward 1 of 1. Computing ended at 2.00 ms; rank 0 then waited 4.00 ms."
    )


def test_buckets_start_when_backward_began_and_computing_has_a_bar():
    trace = ddp(([(0, 3), (2, 6)], 4))
    picture = buckets(trace, began=trace.events[0].start - 5 * MS)
    assert repr(picture).splitlines()[2:] == [
        "bucket 0  1,000,000        5.00          8.00         2.00             1.00",
        "bucket 1  1,000,000        7.00          11.0            0             4.00",
        "Backward 1 of 1. Computing ended at 7.00 ms; rank 0 then waited 4.00 ms.",
    ]
    chart = picture.axes[1]
    assert chart.get_xlabel() == "time since backward began (ms)"
    names = [label.get_text() for label in chart.get_yticklabels()]
    assert names == ["computing", "bucket 0, 1 MB", "bucket 1, 1 MB"]
    with pytest.raises(PlotError, match=r"first bucket was ready, got 1\.00 ms after"):
        buckets(trace, began=trace.events[0].start + MS)


def test_last_backward_is_shown_and_step_picks_another():
    trace = ddp(([(0, 1)], 1), ([(0, 2), (1, 3)], 2), ([(0, 5)], 1))
    assert "Backward 3 of 3" in repr(buckets(trace))
    assert " 0% of all_reduce hidden" in repr(buckets(trace)), "nothing is computed after the last"
    assert repr(buckets(trace, step=1)).count("bucket") == 2
    assert repr(buckets(trace, step=-2)) == repr(buckets(trace, step=1))


def test_bucket_that_was_never_reduced_says_so():
    assert "never" in repr(buckets(ddp(([(0, 2), (1, None)], 3))))


# ---- all pictures


@pytest.mark.parametrize(
    ("draw", "source", "given", "message"),
    [
        (timeline, Trace(2), {}, "the trace is empty: the ranks sent nothing"),
        (timeline, training(2, steps=4), {"step": 4}, "from -4 to 3, where 0 is the .*; got 4"),
        (timeline, training(2, steps=4), {"step": "1"}, "from -4 to 3, where 0 .* got '1'"),
        (timeline, traces.pipeline(2), {"step": 0}, "must be None, got 0: no training steps"),
        (messages, traces.ring(2, 1), {"per_host": 0}, "per_host must be at least 1, .* got 0"),
        (messages, thirty(), {}, "no rank sent a message point to point"),
        (waits, deadlock(), {}, "no rank waits"),
        (waits, 7, {}, r"needs an error with \.waits, got 7"),
        (buckets, ddp(([(0, 1)], 1)), {"rank": 1}, "rank 1 ran no backward pass of a Distributed"),
        (buckets, ddp(([(0, 1)], 1)), {"step": 1}, "step must be from -1 to 0, got 1"),
    ],
)
def test_a_picture_says_what_it_cannot_draw(draw, source, given, message):
    with pytest.raises(PlotError, match=message):
        draw(source, **given)
