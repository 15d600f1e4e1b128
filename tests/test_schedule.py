"""The schedule of a run, in which every message takes one step."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import traces

from ddp_kit.trace.events import Group
from ddp_kit.trace.schedule import CALL, START, WAIT, schedule


def spans(trace, rank):
    """Return what a rank does, as (what, begin, end)."""
    return [(a.what, a.begin, a.end) for a in schedule(trace).actions[rank]]


def test_send_lasts_until_its_receive_is_posted():
    trace = traces.program(*traces.TREE)
    assert spans(trace, 4) == [(CALL, 0, 3)]  # rank 0 takes it last
    assert spans(trace, 0) == [(CALL, 0, 1), (CALL, 1, 2), (CALL, 2, 3)]
    assert spans(trace, 2) == [(CALL, 0, 1), (CALL, 1, 2)]
    assert schedule(trace).length == 3  # as many as the tree has rounds


def test_token_on_a_ring_takes_a_step_for_each_message():
    trace = traces.program("send 1, recv 3", "recv 0, send 2", "recv 1, send 3", "recv 2, send 0")
    assert [spans(trace, rank)[-1] for rank in range(4)] == [
        (CALL, 1, 4),
        (CALL, 1, 2),
        (CALL, 2, 3),
        (CALL, 3, 4),
    ]


def test_ring_of_isends_takes_a_step_for_each_round():
    rank = "isend {0} a, recv {1}, wait a, isend {0} a, recv {1}, wait a"
    trace = traces.program(*(rank.format((r + 1) % 3, (r - 1) % 3) for r in range(3)))
    found = schedule(trace)
    assert found.length == 2
    for own in range(3):
        assert spans(trace, own) == [
            *[(START, 0, 0), (CALL, 0, 1), (WAIT, 1, 1)],
            *[(START, 1, 1), (CALL, 1, 2), (WAIT, 2, 2)],
        ]


def test_receive_that_was_posted_early_holds_no_send():
    trace = traces.program(
        "send 1, all_reduce",
        "irecv 0 a, recv 2, wait a, all_reduce",
        "all_reduce a, send 1, wait a",
    )
    assert spans(trace, 0)[0] == (CALL, 0, 1)
    assert spans(trace, 1) == [(START, 0, 0), (CALL, 0, 1), (WAIT, 1, 1), (CALL, 1, 2)]


def test_collectives_in_flight_take_a_step_each():
    rank = "all_reduce a, all_reduce b, wait a, wait b, barrier"
    trace = traces.program(rank, rank)
    found = schedule(trace)
    assert [found.at[0, index] for index in range(3)] == [0, 1, 2]
    assert spans(trace, 0)[2:] == [(WAIT, 0, 1), (WAIT, 1, 2), (CALL, 2, 3)]


def test_one_pair_has_one_message_in_a_step_and_two_pairs_have_two():
    pair = traces.program(*(f"i{c} a, i{c} b, wait a, wait b" for c in ("send 1", "recv 0")))
    assert schedule(pair).length == 2
    two = traces.program("isend 1 a, isend 2 b, wait a, wait b", "recv 0", "recv 0")
    assert schedule(two).length == 1


def test_message_with_another_tag_overtakes():
    trace = traces.program(
        "isend 1 a tag=1, isend 1 b tag=2, wait a, wait b", "recv 0 tag=2, recv 0 tag=1"
    )
    found = schedule(trace)
    assert found.at[0, 1] < found.at[0, 0] == 1


def test_schedule_does_not_know_how_long_things_took():
    for calls in (traces.TREE, ("isend 1 a, recv 1, wait a", "isend 0 a, recv 0, wait a")):
        for slow in range(len(calls)):
            plain, late = traces.program(*calls), traces.program(*calls, slow=slow)
            assert schedule(plain).at == schedule(late).at


def test_sends_that_were_buffered_take_a_step_for_themselves():
    trace = traces.program("send 1, recv 2", "send 2, recv 0", "send 0, recv 1")
    assert [spans(trace, rank) for rank in range(3)] == [[(CALL, 0, 1), (CALL, 1, 2)]] * 3


def test_calls_that_wait_for_each_other_end():
    receives = schedule(traces.program("recv 1, send 1", "recv 0, send 0"))
    assert receives.at[0, 0] == 0  # the lowest rank goes ahead
    assert receives.at[0, 0] < receives.at[0, 1] <= receives.at[1, 0] < receives.at[1, 1]
    itself = traces.program("recv 0, send 0")
    assert spans(itself, 0) == [(CALL, 0, 1), (CALL, 1, 2)]


def test_collectives_in_opposite_orders_end():
    script = traces.Script(2)
    one, two = Group("1", (0, 1)), Group("2", (0, 1))
    for rank, groups in ((0, (one, two)), (1, (two, one))):
        for group in groups:
            script.add(rank, "all_reduce", "collective", group=group)
    script.message(0, 1)
    at = schedule(script.trace()).at
    assert at[0, 0] < at[0, 1] < at[0, 2] == at[1, 2]
    assert at[1, 0] < at[1, 1] < at[1, 2]


def test_collective_without_a_rank_holds_up_nobody_else():
    trace = traces.program("stuck barrier", "send 2", "recv 1", "stuck barrier")
    found = schedule(trace)
    assert found.length == 1
    assert found.at[0, 0] == found.at[3, 0] == 0


def test_operation_that_nobody_waited_for_takes_its_step():
    assert schedule(traces.program("isend 1 a", "recv 0")).length == 1
    assert schedule(traces.program("isend 1 a", "")).length == 1
    assert schedule(traces.program("", "")).length == 0


@pytest.mark.parametrize("seed", range(20))
def test_schedule_of_a_random_run_keeps_its_promises(seed):
    draw, n = random.Random(seed), 4
    calls, open_waits = [[] for _ in range(n)], [[] for _ in range(n)]
    for number in range(30):
        for own, waits in zip(calls, open_waits, strict=True):
            if waits and draw.random() < 0.4:
                own.append(f"wait {waits.pop(draw.randrange(len(waits)))}")
        if draw.random() < 0.2:
            for own in calls:
                own.append("all_reduce")
            continue
        src, dst = draw.sample(range(n), 2)
        for rank, call in ((src, f"send {dst}"), (dst, f"recv {src}")):
            if draw.random() < 0.5:
                calls[rank].append(f"i{call} x{number}")
                open_waits[rank].append(f"x{number}")
            else:
                calls[rank].append(call)
    trace = traces.program(*(", ".join(own) for own in calls))
    found = schedule(trace)
    begins = {}
    for own in found.actions:
        assert len(own) == len({(a.event.index, a.what == WAIT) for a in own})
        assert all(one.end <= two.begin for one, two in itertools.pairwise(own))
        for action in own:
            key = action.event.rank, action.event.index
            if action.what != WAIT:
                begins[key] = action.begin
            if action.what == CALL:
                assert action.begin <= found.at[key] == action.end - 1
            if action.what == WAIT:
                assert action.end == max(action.begin, found.at[key] + 1)
    pairs = Counter()
    for message in trace.messages():
        send, recv = ((e.rank, e.index) for e in (message.send, message.recv))
        assert found.at[send] == found.at[recv] >= max(begins[send], begins[recv])
        pairs[message.src, message.dst, found.at[send]] += 1
    assert set(pairs.values()) == {1}
    for members in trace.collectives:
        assert len({found.at[rank, event.index] for rank, event in members.items()}) == 1
