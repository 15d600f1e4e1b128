"""The verdict on ranks that can never continue or disagree: from plain data, without processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from reference_executor import run

import ddp_kit as kit
from ddp_kit.error_text import Frame
from ddp_kit.trace import Board, Snapshot, board
from ddp_kit.trace.calls import Call, InternTable
from ddp_kit.trace.events import Event, Group
from ddp_kit.trace.rank.recorder import Recorder
from ddp_kit.verdict import RankState, deadlock, graph, judge, mismatch, shortest_cycle, stuck
from ddp_kit.verdict.mismatches import mismatch_of

TWO, THREE, EIGHT = (Group("0", tuple(range(size))) for size in (2, 3, 8))
PAIR, OTHER_PAIR = Group("1", (0, 1)), Group("2", (0, 1))
LINE = Frame("cell-file", 3, "worker", "exchange(tensor)", True)
ISEND = Event(1, 0, "isend", "send", "send", THREE, 0, peer=0, where=LINE)

COUNT = "Every receive needs a send and every send a receive: count them on both ranks."
RECV_FIRST = (
    "Let one rank send before it receives, or start the receives with irecv and wait for them "
    "after the sends."
)
SEND_FIRST = (
    "A send may block until its receive is posted: let one rank receive before it sends, or start "
    "both with isend and irecv and wait afterwards."
)
ADDRESS = "A send and its receive must have the same tag and the same group."
COLLECTIVE = (
    "Every rank of a group must call the same collectives in the same order: look for an if, a "
    "loop or a return that skips one."
)


def send(dst, tag=0, group=THREE):
    return ("send", dst, tag, group)


def recv(src=None, tag=0, group=THREE):
    return ("recv", src, tag, group)


def all_reduce(group=THREE):
    return ("collective", None, group)


def states_of(*program):
    """Return the states of the ranks at the end; each operation has 400 bytes and the same line."""
    states = run(program).states()
    return [
        replace(state, waits_for=replace(state.waits_for, nbytes=400, where=LINE))
        if state.waits_for
        else state
        for state in states
    ]


# A program, the fact, the lines on the ranks that wait (None: as in another case), and the hint.
CASES = {
    "two_receive": (
        [[recv(1), send(1)], [recv(0), send(0)], []],
        "rank 0 waits for rank 1, rank 1 waits for rank 0: neither can ever send.",
        [
            "rank 0 was waiting for rank 1 in recv(src=1), 400 bytes",
            "rank 1 was waiting for rank 0 in recv(src=0), 400 bytes",
            "    line 3 of worker: exchange(tensor)",
            "rank 2 had returned",
        ],
        RECV_FIRST,
    ),
    "a_ring_receives": (
        [[recv(2), send(1)], [recv(0), send(2)], [recv(1), send(0)]],
        "rank 0 waits for rank 2, rank 2 waits for rank 1, rank 1 waits for rank 0: "
        "none of them can ever send.",
        None,
        RECV_FIRST,
    ),
    "two_send": (
        [[send(1), recv(1)], [send(0), recv(0)], []],
        "rank 0 waits until rank 1 receives, rank 1 waits until rank 0 receives: "
        "neither can ever receive.",
        None,
        SEND_FIRST,
    ),
    "a_ring_sends_and_receives": (
        [[send(1)], [recv(2)], [recv(0)]],
        "rank 0 waits until rank 1 receives, rank 1 waits for a message from rank 2, "
        "rank 2 waits for a message from rank 0: none of them can ever continue.",
        None,
        SEND_FIRST,
    ),
    "the_sender_has_returned": (
        [[recv(1)], [recv(2)], []],
        "rank 1 waits for a message from rank 2, which has returned without sending it.",
        None,
        COUNT,
    ),
    "one_receive_too_many": (
        [[recv(1), recv(1), recv(1)], [send(0), send(0)], []],
        "rank 0 waits for a 3rd message from rank 1, which sent 2 and has returned.",
        None,
        COUNT,
    ),
    "one_send_too_many": (
        [[send(1, 5), ("isend", 1, 5, THREE), ("wait", 0)], [recv(0, 5)], []],
        "rank 0 sends a 2nd message with tag 5 to rank 1, which received 1 of these and has "
        "returned.",
        [
            "rank 0 was waiting for rank 1 in isend(dst=1, tag=5), 400 bytes",
            "    line 3 of worker: exchange(tensor)",
            "ranks 1 and 2 had returned",
        ],
        COUNT,
    ),
    "the_receiver_has_returned": (
        [[send(1)], [], []],
        "rank 0 sends a message to rank 1, which has returned without receiving it.",
        None,
        COUNT,
    ),
    "only_another_tag_was_sent": (
        [[recv(1, 5), recv(1)], [send(0, 5)], []],
        "rank 0 waits for a message with tag 0 from rank 1, which has returned without sending it.",
        None,
        COUNT,
    ),
    "a_wrong_tag": (
        [[send(1, 1)], [recv(0, 2)], []],
        "rank 0 sends to rank 1 with tag 1, but rank 1 receives from rank 0 with tag 2.",
        None,
        ADDRESS,
    ),
    "a_wrong_tag_of_a_rank_that_went_on": (
        [[("isend", 1, 1, THREE), recv(1)], [recv(0), send(0)], []],
        "rank 0 sends to rank 1 with tag 1, but rank 1 receives from rank 0 with tag 0.",
        None,
        ADDRESS,
    ),
    "a_wrong_tag_to_any_source": (
        [[send(1, 1)], [recv(None, 2)], [recv(1)]],
        "rank 0 sends to rank 1 with tag 1, but rank 1 receives from any rank with tag 2.",
        [
            "rank 0 was waiting for rank 1 in send(dst=1, tag=1), 400 bytes",
            "rank 1 was waiting for any of ranks 0 and 2 in recv(tag=2), 400 bytes",
            "rank 2 was waiting for rank 1 in recv(src=1), 400 bytes",
            "    line 3 of worker: exchange(tensor)",
        ],
        ADDRESS,
    ),
    "a_wrong_group": (
        [[send(1, 0, PAIR)], [recv(0)], []],
        "rank 0 sends to rank 1 in the group of ranks 0 and 1, but rank 1 receives from rank 0 "
        "in the group of ranks 0, 1 and 2.",
        None,
        ADDRESS,
    ),
    "a_rank_skipped_a_collective_and_returned": (
        [[all_reduce()], [all_reduce()], []],
        "ranks 0 and 1 wait in all_reduce for rank 2, which has returned without calling it.",
        None,
        COLLECTIVE,
    ),
    "ranks_left_the_root_of_a_broadcast": (
        [[("collective", 0, THREE)], [], []],
        "rank 0 waits in broadcast(src=0) for ranks 1 and 2, which have returned without "
        "calling it.",
        [
            "rank 0 was waiting for ranks 1 and 2 in broadcast(src=0), 400 bytes",
            "    line 3 of worker: exchange(tensor)",
            "ranks 1 and 2 had returned",
        ],
        COLLECTIVE,
    ),
    "a_rank_receives_before_a_collective": (
        [[all_reduce()], [all_reduce()], [recv(0), all_reduce()]],
        "ranks 0 and 1 wait in all_reduce for rank 2, rank 2 waits for a message from rank 0: "
        "none of them can ever continue.",
        None,
        COLLECTIVE,
    ),
    "a_rank_sends_before_a_collective": (
        [[all_reduce(PAIR)], [send(0), all_reduce(PAIR)], []],
        "rank 0 waits in all_reduce(group=[0, 1]) for rank 1, rank 1 waits until rank 0 "
        "receives: neither can ever continue.",
        None,
        COLLECTIVE,
    ),
    "half_a_sub_group": (
        [[all_reduce(PAIR), all_reduce()], [all_reduce()], [all_reduce()]],
        "rank 0 waits in all_reduce(group=[0, 1]) for rank 1, ranks 1 and 2 wait in all_reduce "
        "for rank 0: none of them can ever continue.",
        [
            "rank 0 was waiting for rank 1 in all_reduce(group=[0, 1]), 400 bytes",
            "ranks 1 and 2 were waiting for rank 0 in all_reduce, 400 bytes",
            "    line 3 of worker: exchange(tensor)",
        ],
        COLLECTIVE,
    ),
    "two_groups_in_another_order": (
        [[all_reduce(PAIR)], [all_reduce(OTHER_PAIR)], []],
        "rank 0 waits in all_reduce(group=[0, 1]) for rank 1, rank 1 waits in "
        "all_reduce(group=[0, 1]) of another group for rank 0: neither can ever continue.",
        None,
        COLLECTIVE,
    ),
    "any_source_of_two_ranks": (
        [[recv(None, 0, TWO)], [recv(0, 0, TWO)]],
        "rank 0 waits for rank 1, rank 1 waits for rank 0: neither can ever send.",
        None,
        RECV_FIRST,
    ),
    "any_source_of_two_ranks_once_too_often": (
        [[recv(None, 0, TWO), recv(None, 0, TWO)], [send(0, 0, TWO)]],
        "rank 0 waits for a 2nd message from rank 1, which sent 1 and has returned.",
        None,
        COUNT,
    ),
    "the_shortest_cycle_is_not_the_first": (
        [[recv(1)], [recv(2)], [all_reduce()]],
        "rank 1 waits for a message from rank 2, rank 2 waits in all_reduce for rank 1: "
        "neither can ever continue.",
        None,
        COLLECTIVE,
    ),
    "any_source_and_all_have_returned": (
        [[recv()], [], []],
        "rank 0 waits for a message from any rank, but ranks 1 and 2 have returned.",
        None,
        COUNT,
    ),
    "any_source_and_nobody_is_left": (
        [[recv()], [recv(0)], []],
        "rank 0 waits for a message from any rank, but rank 2 has returned and rank 1 waits too.",
        [
            "rank 0 was waiting for any of ranks 1 and 2 in recv, 400 bytes",
            "rank 1 was waiting for rank 0 in recv(src=0), 400 bytes",
            "    line 3 of worker: exchange(tensor)",
            "rank 2 had returned",
        ],
        COUNT,
    ),
}


@pytest.mark.parametrize(("program", "fact", "lines", "hint"), CASES.values(), ids=CASES)
def test_a_deadlock_is_explained(program, fact, lines, hint):
    error = deadlock(states_of(*program)).error()
    assert isinstance(error, kit.DeadlockError)
    first, *between, last = str(error).splitlines()
    assert (first, last) == (fact, hint)
    assert lines in (None, between)


def test_a_worker_for_two_ranks_on_more_is_told_so():
    two = "If the worker is meant for two ranks, pass world_size=2."
    four = Group("0", (0, 1, 2, 3))
    for other in (recv(0, group=four), send(1, group=four)):
        pair = [[send(1, group=four)], [recv(0, group=four)]]
        error = deadlock(states_of(*pair, [other], [other])).error()
        assert str(error).splitlines()[-1] == f"{COUNT} {two}"
    # With a single rank stuck, or rank 1 as well, something else is wrong.
    assert deadlock(states_of([send(1)], [recv(0)], [recv(0)])).hint == COUNT
    assert deadlock(states_of([], [recv(0)], [recv(0)])).hint == COUNT


def test_an_isend_that_nobody_waited_for_is_named_although_there_is_a_cycle():
    states = states_of([recv(1)], [recv(0)], [])
    states[1] = replace(states[1], given_up={(1, 0, 0, THREE): {0: ISEND}})
    fact, *_, hint = str(deadlock(states).error()).splitlines()
    assert fact == (
        "rank 0 waits for a message from rank 1, which started an isend but never waited for it."
    )
    assert hint.startswith("Keep what isend returns and call its wait()")


def test_shortest_cycle_is_found_from_its_lowest_rank():
    assert shortest_cycle({0: [1], 1: [2], 2: [3, 1], 3: [0]}) == [1, 2]
    assert shortest_cycle({0: [3], 3: [2], 2: [1], 1: [0]}) == [0, 3, 2, 1]
    assert shortest_cycle({0: [1], 1: [2]}) == []


def test_a_long_ring_is_explained_by_its_first_waits():
    error = deadlock(states_of(*[[recv((rank - 1) % 8, 0, EIGHT)] for rank in range(8)]))
    assert error.fact == (
        "rank 0 waits for rank 7, rank 7 waits for rank 6, and so on, rank 1 waits for rank 0: "
        "none of them can ever send"
    )
    assert len(error.waits) == 8


def test_a_wait_has_its_parts():
    error = deadlock(states_of([send(1, 5)], [recv(0, 6)], []))
    wait = error.waits[0]
    assert (wait.rank, wait.op, wait.peers) == (0, "send(dst=1, tag=5)", (1,))
    assert (wait.tag, wait.nbytes, wait.where) == (5, 400, LINE)
    assert error.returned == (2,)


def test_a_barrier_has_no_bytes():
    barrier = Event(0, 0, "barrier", "collective", "barrier", TWO, 0)
    new_group = replace(barrier, op="new_group", method="new_group", inputs=((0, 1),))
    for event in (barrier, new_group):
        states = [RankState(0, "waiting", event, collectives={TWO: 1}), RankState(1, "returned")]
        (wait,) = deadlock(states).waits
        assert wait.nbytes is None


def test_a_rank_alone_that_waits_for_any_is_stuck():
    alone = Group("0", (0,))
    error = deadlock(states_of([recv(None, 0, alone)]))
    assert error.fact == (
        "rank 0 waits for a message from any rank, but it is the only rank in the group"
    )


def test_nobody_is_stuck_while_a_rank_could_still_help():
    waiting, returned = states_of([recv(1)], [], [])[:2]
    assert stuck([waiting, returned]) == {0: (1,)}
    assert stuck([waiting, RankState(1, "running")]) == {}
    assert stuck([waiting, RankState(1, "waiting")]) == {}  # in what, the kit does not know
    assert stuck([waiting]) == {}
    assert stuck([replace(waiting, status="running"), returned]) == {}
    assert deadlock([waiting]) is None


def test_nobody_is_stuck_in_a_kind_of_wait_that_the_kit_does_not_know():
    unknown = replace(states_of([recv(1)], [], [])[0].waits_for, kind="other")
    assert stuck([RankState(0, "waiting", unknown), RankState(1, "returned")]) == {}


KEY = Event(0, 0, "store.get('address')", "key", "key", Group("store", ()), 0)


def test_a_rank_waits_for_a_key_as_long_as_one_rank_could_set_it():
    waiting, gone = RankState(0, "waiting", KEY), RankState(1, "returned")
    assert stuck([waiting, gone, RankState(2, "running")]) == {}
    assert stuck([waiting, gone, RankState(2, "returned")]) == {0: (1, 2)}
    assert deadlock([waiting, gone]).fact == (
        "rank 0 waits for the key 'address', which no rank has set, but rank 1 has returned"
    )
    assert deadlock([waiting]).fact == (
        "rank 0 waits for the key 'address', which no rank has set, but it is the only rank"
    )
    (wait,) = deadlock([waiting, gone, RankState(2, "returned")]).waits
    assert wait.doing == "waiting for any of ranks 1 and 2 in store.get('address')"


def test_a_rank_is_stuck_only_if_no_thread_of_it_can_go_on():
    receives = Event(0, 0, "recv", "recv", "recv", THREE, 0, peer=1)
    other = replace(receives, index=1, peer=2)
    state, gone = RankState(0, "waiting", receives, alternatives=(other,)), RankState(1, "returned")
    assert stuck([state, gone, RankState(2, "running")]) == {}
    assert stuck([state, gone, RankState(2, "returned", sends={other.channel: 1})]) == {}
    assert stuck([state, gone, RankState(2, "returned")]) == {0: (1,)}
    waits_for_it = Event(2, 0, "recv", "recv", "recv", THREE, 0, peer=0)
    assert stuck([state, gone, RankState(2, "waiting", waits_for_it)]) == {0: (1,), 2: (0,)}


def test_a_callback_of_a_rank_that_has_returned_may_still_send():
    waiting = RankState(0, "waiting", Event(0, 0, "recv", "recv", "recv", THREE, 0, peer=1))
    reduces = Event(1, 0, "all_reduce", "collective", "allreduce", THREE, 0)
    returned = RankState(1, "returned", alternatives=(reduces,), collectives={THREE: 1})
    assert stuck([waiting, returned, RankState(2, "running")]) == {0: (1,)}  # rank 0 has to join
    joined = replace(waiting, collectives={THREE: 1})
    assert stuck([joined, returned, RankState(2, "running")]) == {}
    assert stuck([joined, returned, RankState(2, "returned")]) == {0: (1,)}
    assert stuck([joined, returned, RankState(2, "returned", collectives={THREE: 1})]) == {}


def test_nobody_is_stuck_in_a_collective_that_all_have_called():
    event = Event(0, 0, "all_reduce", "collective", "allreduce", TWO, 0)
    both = [RankState(r, "waiting", replace(event, rank=r), collectives={TWO: 1}) for r in (0, 1)]
    assert stuck(both) == {}
    assert deadlock(both) is None


GLOO = Group("0", (0, 1, 2, 3), "cpu:gloo,cuda:gloo")
ON_GLOO = [
    (0, [0, 1, 2], "returned", {1: (3,)}),  # 0 sends to 1 and 2, and 1 relays to 3
    (0, [0, 1, 2], "running", {}),
    (0, [0, 2, 3], "returned", {0: (1,), 3: (1,)}),
    (0, [1, 2, 3], "returned", {1: (0,), 2: (0,), 3: (0,)}),
    (2, [0, 1, 2], "returned", {2: (3,), 1: (3,)}),  # 2 sends to 3 and 0, and 3 relays to 1
    (2, [1, 2, 3], "returned", {2: (0,)}),
]


def test_a_rank_may_leave_a_broadcast_before_all_have_joined():
    # The data of a slow broadcast is on its way to rank 1; rank 2 waits for what comes after.
    event = Event(0, 0, "broadcast", "collective", "broadcast", THREE, 0, root=0)
    after = Event(2, 0, "recv", "recv", "recv", THREE, 0, peer=1)
    states = [
        RankState(0, "running", collectives={THREE: 1}),
        RankState(1, "waiting", replace(event, rank=1), collectives={THREE: 1}),
        RankState(2, "waiting", after),
    ]
    assert stuck(states) == {}
    assert stuck([*states[:2], RankState(2, "returned")]) == {1: (2,)}  # nobody will take its data


@pytest.mark.parametrize(("root", "joined", "away", "found"), ON_GLOO, ids=str)
def test_a_broadcast_on_gloo_waits_for_the_ranks_of_its_tree(root, joined, away, found):
    states = [
        RankState(
            rank,
            "waiting" if rank in joined else away,
            Event(rank, 0, "broadcast", "collective", "broadcast", GLOO, 0, root=root)
            if rank in joined
            else None,
            collectives={GLOO: int(rank in joined)},
        )
        for rank in GLOO.ranks
    ]
    assert stuck(states) == found


def isend(sequence, *, dropped=True, **given):
    """Return an isend from rank 0 to rank 1."""
    event = Event(0, sequence, "isend", "send", "send", TWO, sequence, peer=1, where=LINE)
    return replace(event, given_up=dropped, **given)


def irecv(sequence, *, dropped=True, **given):
    """Return an irecv of rank 1 from rank 0."""
    event = Event(1, sequence, "irecv", "recv", "recv", TWO, sequence, peer=0, where=LINE)
    return replace(event, given_up=dropped, **given)


def state_of(rank, *events, waits=False, status="returned"):
    """Return the state of a rank after these events; waits: for the last of them."""
    state = RankState(rank, "waiting" if waits else status, events[-1] if waits else None)
    for event in events:
        counts = {"send": state.sends, "recv": state.recvs}.get(event.kind, state.collectives)
        key = event.channel or event.group
        counts[key] = counts.get(key, 0) + 1
        if event.given_up:
            state.given_up.setdefault(key, {})[event.sequence] = event
    return state


def test_the_next_message_does_not_take_the_place_of_one_that_was_given_up():
    last = isend(2, dropped=False)
    sender = state_of(0, isend(0), isend(1), last, waits=True)
    states = [sender, state_of(1, irecv(0, dropped=False), waits=True)]
    assert stuck(states) == {0: (1,), 1: (0,)}
    lines = str(deadlock(states).error()).splitlines()
    assert lines.count("rank 0 never waited for isend(dst=1)") == 1
    assert lines[0].startswith("rank 1 waits for a message from rank 0, which started an isend")


def test_a_message_that_had_come_before_it_was_given_up_stops_no_later_one():
    reply = Event(0, 2, "recv", "recv", "recv", TWO, 0, peer=1)
    sender = state_of(0, isend(0), isend(1, dropped=False), reply, waits=True)
    receiver = state_of(1, irecv(0, dropped=False), irecv(1, dropped=False), waits=True)
    assert stuck([sender, receiver]) == {}


def test_a_send_to_a_receive_that_was_given_up_is_explained():
    states = [state_of(0, isend(0, dropped=False), waits=True), state_of(1, irecv(0))]
    fact, *_, hint = str(deadlock(states).error()).splitlines()
    assert (
        fact
        == "rank 0 waits until rank 1 receives, which started an irecv but never waited for it."
    )
    assert hint.startswith("Keep what irecv returns")


BARRIERS = [Event(rank, 9, "barrier", "collective", "barrier", TWO, 0) for rank in (0, 1)]
KEPT, DROPPED = irecv(0, dropped=False), irecv(0)


@pytest.mark.parametrize(
    ("here", "there", "found"),
    [
        ([isend(0)], [DROPPED], {0, 1}),
        ([isend(0, dropped=False)], [DROPPED], {0, 1}),
        ([isend(0, dropped=False)], [replace(DROPPED, peer=None)], {0, 1}),
        ([], [DROPPED], set()),  # nothing was sent, so nothing was in flight
        ([isend(0)], [], set()),
        ([isend(0, dropped=False)], [KEPT], set()),
        ([isend(0, group=PAIR)], [replace(DROPPED, group=PAIR)], set()),  # another connection
    ],
)
def test_a_connection_that_a_dropped_work_has_blocked_is_recognised(here, there, found):
    states = [
        state_of(0, *here, BARRIERS[0], waits=True),
        state_of(1, *there, BARRIERS[1], waits=True),
    ]
    assert stuck(states) == {}
    assert set(graph.blocked(states)) == found
    assert not graph.blocked([states[0], replace(states[1], status="running", collectives={})])


def test_stuck_ranks_in_different_collectives_are_a_mismatch():
    line = {"kind": "collective", "group": THREE, "sequence": 0, "index": 0, "where": LINE}
    reduce = Event(0, op="all_reduce", method="allreduce", inputs=((4,),), **line)
    barrier = Event(1, op="barrier", method="barrier", **line)
    states = [RankState(e.rank, "waiting", e, collectives={THREE: 1}) for e in (reduce, barrier)]
    error = deadlock([*states, RankState(2, "returned")]).error()
    assert isinstance(error, kit.MismatchError)
    assert str(error).splitlines() == [
        "rank 0 calls all_reduce, rank 1 calls barrier.",
        "rank 0 called all_reduce with shape (4,)",
        "rank 1 called barrier",
        "    line 3 of worker: exchange(tensor)",
        "All ranks of a group must call the same collectives, in the same order.",
    ]


def test_a_receive_from_any_source_can_take_a_send():
    (waiting, returned) = states_of([send(1)], [])
    assert stuck([waiting, returned]) == {0: (1,)}
    assert stuck([waiting, replace(returned, any_source={(0, THREE): 1})]) == {}
    assert stuck([waiting, replace(returned, any_source={(1, THREE): 1})]) == {0: (1,)}


# Collectives and messages that do not agree


def call(rank, op="all_reduce", method="allreduce", group=TWO, sequence=0, **given):
    given = {"dtype": "float32", "inputs": ((4,),), **given}
    return Event(rank, sequence, op, "collective", method, group, sequence, where=LINE, **given)


def message(kind, rank, peer, nbytes=400, dtype="float32", tag=0):
    return Event(
        rank, 0, kind, kind, kind, TWO, 0, peer, tag, nbytes=nbytes, dtype=dtype, where=LINE
    )


def vectors(*sizes):
    return tuple((size,) for size in sizes)


SAME_TENSORS = "All ranks must pass tensors of the same shape and dtype to a collective."
SAME_CHUNKS = "What one rank sends to another must have the shape that the other expects."
SAME_DEVICE = (
    "All ranks must pass tensors on the same kind of device: .to(kit.device()) moves one there."
)
SAME_BUFFER = "Receive into a tensor with as many elements and the same dtype as the one sent."

MISMATCHES = {
    "op": (
        [call(0), call(1, "broadcast", "broadcast", root=0)],
        "rank 0 calls all_reduce, rank 1 calls broadcast.",
        [
            "rank 0 called all_reduce with float32 of shape (4,)",
            "rank 1 called broadcast(src=0) with float32 of shape (4,)",
        ],
        "All ranks of a group must call the same collectives, in the same order.",
    ),
    "op_of_one_name": (
        [call(0, "all_gather", "allgather"), call(1, "all_gather", "_allgather_base")],
        "rank 0 calls all_gather with allgather, rank 1 with _allgather_base.",
        None,
        "All ranks of a group must call the same collectives, in the same order.",
    ),
    "reduce_op": (
        [call(0, reduce_op="SUM"), call(1, reduce_op="MAX")],
        "rank 0 calls all_reduce with op=SUM, rank 1 with op=MAX.",
        None,
        "All ranks must use the same op.",
    ),
    "root": (
        [call(0, "reduce", "reduce", root=0), call(1, "reduce", "reduce", root=1)],
        "rank 0 calls reduce with dst=0, rank 1 with dst=1.",
        [
            "rank 0 called reduce(dst=0) with float32 of shape (4,)",
            "rank 1 called reduce(dst=1) with float32 of shape (4,)",
        ],
        "All ranks must use the same root.",
    ),
    "dtype": (
        [call(0), call(1, dtype="float64")],
        "rank 0 calls all_reduce with float32, rank 1 with float64.",
        None,
        SAME_TENSORS,
    ),
    "shape": (
        [call(0, group=THREE), call(1, group=THREE, inputs=vectors(5)), call(2, group=THREE)],
        "ranks 0 and 2 call all_reduce with shape (4,), rank 1 with shape (5,).",
        None,
        SAME_TENSORS,
    ),
    "gather": (
        [
            call(0, "gather", "gather", root=0, outputs=vectors(4, 4)),
            call(1, "gather", "gather", root=0, inputs=vectors(5)),
        ],
        "in gather, rank 1 sends shape (5,) to rank 0, but rank 0 expects shape (4,).",
        [
            "rank 0 called gather(dst=0) with float32 of shape (4,) into 2 tensors of shape (4,)",
            "rank 1 called gather(dst=0) with float32 of shape (5,)",
        ],
        SAME_CHUNKS,
    ),
    "scatter": (
        [
            call(0, "scatter", "scatter", root=0, inputs=vectors(4, 4), outputs=vectors(4)),
            call(1, "scatter", "scatter", root=0, inputs=(), outputs=vectors(5)),
        ],
        "in scatter, rank 0 sends shape (4,) to rank 1, but rank 1 expects shape (5,).",
        [
            "rank 0 called scatter(src=0) with 2 float32 tensors of shape (4,) into shape (4,)",
            "rank 1 called scatter(src=0) with float32 of shape (5,)",
        ],
        SAME_CHUNKS,
    ),
    "all_gather": (
        [
            call(0, "all_gather", "allgather", outputs=vectors(4, 4)),
            call(1, "all_gather", "allgather", inputs=vectors(5), outputs=vectors(5, 5)),
        ],
        "in all_gather, rank 0 sends shape (4,) to rank 1, but rank 1 expects shape (5,).",
        None,
        SAME_CHUNKS,
    ),
    "reduce_scatter": (
        [
            call(r, "reduce_scatter", "reduce_scatter", inputs=vectors(4, n), outputs=vectors(n))
            for r, n in [(0, 4), (1, 5)]
        ],
        "in reduce_scatter, rank 0 sends shape (4,) to rank 1, but rank 1 expects shape (5,).",
        None,
        SAME_CHUNKS,
    ),
    "all_to_all": (
        [
            call(r, "all_to_all", "alltoall", inputs=vectors(1, 2), outputs=vectors(1, 2))
            for r in (0, 1)
        ],
        "in all_to_all, rank 0 sends shape (2,) to rank 1, but rank 1 expects shape (1,).",
        [
            "ranks 0 and 1 called all_to_all with float32 of shapes (1,), (2,) into shapes "
            "(1,), (2,)"
        ],
        SAME_CHUNKS,
    ),
    "split_sizes": (
        [
            call(
                0,
                "all_to_all_single",
                "alltoall_base",
                inputs=((4, 2),),
                outputs=((4, 2),),
                splits=((1, 3), (1, 3)),
            ),
            call(1, "all_to_all_single", "alltoall_base", inputs=((4, 2),), outputs=((4, 2),)),
        ],
        "in all_to_all_single, rank 0 sends shape (3, 2) to rank 1, but rank 1 expects shape "
        "(2, 2).",
        [
            "rank 0 called all_to_all_single(input_split_sizes=[1, 3], output_split_sizes=[1, 3]) "
            "with float32 of shape (4, 2) into shape (4, 2)",
            "rank 1 called all_to_all_single with float32 of shape (4, 2) into shape (4, 2)",
        ],
        SAME_CHUNKS,
    ),
    "new_group": (
        [
            call(r, "new_group", "new_group", inputs=(ranks,), dtype="")
            for r, ranks in enumerate([(0, 1), (0,)])
        ],
        "rank 0 calls new_group with [0, 1], rank 1 with [0].",
        ["rank 0 called new_group([0, 1])", "rank 1 called new_group([0])"],
        "All ranks must create the same groups in the same order, including those that they do "
        "not belong to.",
    ),
    "bytes_of_a_message": (
        [message("send", 0, 1, 1), message("recv", 1, 0, 1200)],
        "rank 0 sends 1 byte, rank 1 receives into a tensor of 1,200 bytes.",
        [
            "rank 0 called send(dst=1) with 1 byte of float32",
            "rank 1 called recv(src=0) with 1,200 bytes of float32",
        ],
        SAME_BUFFER,
    ),
    "device": (
        [call(0), call(1, device="cuda")],
        "rank 0 calls all_reduce with a tensor on cpu, rank 1 with a tensor on cuda.",
        [
            "rank 0 called all_reduce with float32 of shape (4,)",
            "rank 1 called all_reduce with float32 of shape (4,) on cuda",
        ],
        SAME_DEVICE,
    ),
    "device_of_a_message": (
        [message("send", 0, 1), replace(message("recv", 1, 0), device="cuda")],
        "rank 0 sends a tensor on cpu, rank 1 receives into one on cuda.",
        None,
        SAME_DEVICE,
    ),
    "dtype_of_a_message": (
        [message("recv", 0, 1, 800, "float64"), message("send", 1, 0)],
        "rank 1 sends float32, rank 0 receives into a tensor of float64.",
        None,
        SAME_BUFFER,
    ),
}


@pytest.mark.parametrize(
    ("events", "fact", "lines", "hint"), MISMATCHES.values(), ids=list(MISMATCHES)
)
def test_a_mismatch_is_explained(events, fact, lines, hint):
    error = mismatch(iter(events)).error()
    first, *between, where, last = str(error).splitlines()
    assert (first, where, last) == (fact, "    line 3 of worker: exchange(tensor)", hint)
    assert lines in (None, between)
    assert [call.rank for call in error.calls] == [event.rank for event in events]


ALIKE = {
    "a_member_is_missing": [call(0, group=THREE), call(2, group=THREE)],
    "different_places": [call(0, sequence=0), call(1, sequence=1, inputs=vectors(5))],
    "different_groups": [call(0), call(1, group=PAIR, dtype="int8")],
    "broadcast_into": [
        call(0, "broadcast", "broadcast", root=0),
        call(1, "broadcast", "broadcast", root=0, inputs=(), outputs=vectors(4)),
    ],
    "gather_of_different_sizes": [
        call(0, "gather", "gather", root=0, outputs=vectors(4, 5)),
        call(1, "gather", "gather", root=0, inputs=vectors(5)),
    ],
    "scatter": [
        call(0, "scatter", "scatter", root=0, inputs=vectors(4, 5), outputs=vectors(4)),
        call(1, "scatter", "scatter", root=0, inputs=(), outputs=vectors(5)),
    ],
    "all_gather_of_different_sizes": [
        call(0, "all_gather", "allgather", outputs=vectors(4, 5)),
        call(1, "all_gather", "allgather", inputs=vectors(5), outputs=vectors(4, 5)),
    ],
    "all_to_all_of_different_sizes": [
        call(0, "all_to_all", "alltoall", inputs=vectors(1, 2), outputs=vectors(1, 3)),
        call(1, "all_to_all", "alltoall", inputs=vectors(3, 4), outputs=vectors(2, 4)),
    ],
    "splits": [
        call(r, "", "alltoall_base", inputs=((4, 2),), outputs=((n, 2),), splits=(given, taken))
        for r, n, given, taken in [(0, 2, (1, 3), (1, 1)), (1, 6, (1, 3), (3, 3))]
    ],
    "no_rows_of_another_shape": [
        call(0, "", "alltoall_base", inputs=((0,),), outputs=((3, 2),), splits=((0, 0), (0, 3))),
        call(1, "", "alltoall_base", inputs=((3, 2),), outputs=((0,),), splits=((3, 0), (0, 0))),
    ],
    "splits_left_to_torch": [
        call(0, "", "alltoall_base", inputs=((4,),), outputs=((4,),), splits=((2, 2), ())),
        call(1, "", "alltoall_base", inputs=((4,),), outputs=((4,),)),
    ],
    "tensors_that_the_method_cannot_take": [
        call(0, "all_to_all", "alltoall_base", inputs=(), outputs=()),
        call(1, "all_to_all", "alltoall_base"),
    ],
    "as_many_numbers_in_another_shape": [call(0), call(1, inputs=((2, 2),))],
    "one_number_and_a_scalar": [call(0, inputs=((),)), call(1, inputs=((1,),))],
    "chunks_of_another_shape": [
        call(0, "scatter", "scatter", root=0, inputs=vectors(4, 4), outputs=vectors(4)),
        call(1, "scatter", "scatter", root=0, inputs=(), outputs=((2, 2),)),
    ],
    "rows_of_another_shape": [
        call(0, "", "alltoall_base", inputs=((4,),), outputs=((4,),)),
        call(1, "", "alltoall_base", inputs=((2, 2),), outputs=((2, 2),)),
    ],
    "messages_of_one_shape": [message("send", 0, 1), message("recv", 1, 0)],
    "messages_with_other_tags": [message("send", 0, 1), message("recv", 1, 0, 8, tag=1)],
    "nobody_sent_to_any_source": [message("send", 0, 1, 8), message("recv", 1, None)],
    "both_ways": [message("send", 0, 1, 8), message("send", 1, 0, 4)],
}


@pytest.mark.parametrize("events", ALIKE.values(), ids=list(ALIKE))
def test_calls_that_agree_are_no_mismatch(events):
    assert mismatch(events) is None


def test_groups_with_other_members_agree():
    # The product of these members is that of a shape with as many elements.
    inputs = [((1, 6),), ((2, 3),)]
    events = [call(r, "new_group", "new_group", inputs=inputs[r], dtype="") for r in (0, 1)]
    assert "[1, 6]" in mismatch(events).fact


def test_the_outputs_of_one_rank_are_not_compared():
    outputs = [vectors(4, 5), vectors(4, 4)]
    events = [call(r, "all_gather", "allgather", outputs=outputs[r]) for r in (0, 1)]
    assert mismatch(events).fact == (
        "in all_gather, rank 1 sends shape (4,) to rank 0, but rank 0 expects shape (5,)"
    )


def test_a_rank_without_a_dtype_is_no_mismatch():
    events = [call(0), call(1, dtype="")]
    assert mismatch(events) is None


@pytest.mark.parametrize(
    ("number", "ordinal"), [(2, "2nd"), (3, "3rd"), (11, "11th"), (21, "21st"), (1112, "1,112th")]
)
def test_a_message_has_an_ordinal(number, ordinal):
    event = Event(0, 0, "recv", "recv", "recv", TWO, number - 1, peer=1)
    sender = RankState(1, "returned", sends={event.channel: number - 1})
    error = deadlock([RankState(0, "waiting", event), sender])
    assert error.fact.startswith(f"rank 0 waits for a {ordinal} message from rank 1, which sent ")


def test_two_receives_with_one_match_key_are_no_message():
    assert mismatch([message("recv", 0, 1), message("recv", 0, 1, 8)]) is None


def test_the_earliest_mismatch_is_reported():
    first = [call(r, sequence=0, inputs=vectors(4)) for r in (0, 1)]
    second = [call(r, sequence=1, inputs=vectors(r)) for r in (0, 1)]
    third = [message("send", 0, 1), message("recv", 1, 0, 8)]
    by_rank = [list(calls) for calls in zip(first, third, second, strict=True)]
    assert mismatch(by_rank[0] + by_rank[1]).fact.startswith("rank 0 sends")
    by_rank = [list(calls) for calls in zip(first, second, third, strict=True)]
    assert mismatch(by_rank[0] + by_rank[1]).fact.startswith("rank 0 calls all_reduce")


def test_the_mismatch_whose_first_call_comes_first_is_reported():
    far, near = Group("far", (0, 2)), Group("near", (0, 1))
    events = [
        call(0, group=far),
        call(0, group=near),
        call(1, group=near, dtype="int8"),
        call(2, group=far, dtype="int8"),
    ]
    assert mismatch(events).fact == "rank 0 calls all_reduce with float32, rank 2 with int8"


# Which error wins, from what ranks have written on their boards


def snapshot(rank, *calls, waits=False, limited=False, group=TWO, dropped=0):
    """A rank that has made these calls, and waits in the last one; the first are dropped."""
    page = Board()
    recorder = Recorder(InternTable(page), 1)
    for method, op, size, peer in calls:
        tensor = ((size,), torch.float32)
        given = {"outputs" if method == "recv" else "inputs": (tensor,)}
        posted = recorder.post((group.name, group.ranks), Call(method, **given), peer, op=op)
        if posted.index < dropped:
            page.write_bit(posted.index, board.RowBits.GIVEN_UP)
            recorder.table.change(posted.site.count, given_up=1)
    if waits:
        page.begin_wait(posted.index, 2000, limited, shown=True)
    return Snapshot(rank, page.read())


def test_a_group_is_not_hashed_for_each_call_that_ranks_agree_on(monkeypatch):
    ranks = [snapshot(n, *[("allreduce", "all_reduce", 4, None)] * 1000) for n in (0, 1)]
    looks = Counter()
    monkeypatch.setattr(Group, "__hash__", lambda self: looks.update(["group"]) or hash(self.name))
    assert mismatch_of(ranks) is None
    assert looks["group"] <= 2  # it takes longer than all the rest


def reduces(size=4):
    return ("allreduce", "all_reduce", size, None)


def receives(peer):
    return ("recv", "recv", 4, peer)


DISAGREE = "rank 0 calls all_reduce with shape (4,), rank 1 with shape (5,)"
STUCK = "rank 0 waits for rank 1, rank 1 waits for rank 0: neither can ever send"
RAN_ON = [snapshot(0, reduces(4)), snapshot(1, reduces(5))]
BOTH_RECEIVE = [snapshot(0, receives(1), waits=True), snapshot(1, receives(0), waits=True)]
JUDGED = {
    "agree": ([snapshot(0, reduces()), snapshot(1, reduces())], True, None),
    "disagree": (RAN_ON, True, DISAGREE),
    "stuck_and_stopped": (BOTH_RECEIVE, True, None),  # what stopped them is the error
    "stuck": (BOTH_RECEIVE, False, STUCK),
    "disagree_and_nobody_waits": (RAN_ON, False, None),
    "disagree_in_what_one_waits_in": (
        [snapshot(0, reduces(4), waits=True), snapshot(1, reduces(5))],
        False,
        DISAGREE,
    ),
    "disagree_and_wait_in_something_else": (
        [snapshot(0, reduces(4), reduces(6), waits=True), snapshot(1, reduces(5))],
        False,
        None,
    ),
    "disagreed_before_they_were_stuck": (
        [snapshot(r, reduces(4 + r), receives(1 - r), waits=True) for r in (0, 1)],
        False,
        DISAGREE,
    ),
    "one_waits_with_a_limit": (
        [snapshot(0, receives(1), waits=True, limited=True), BOTH_RECEIVE[1]],
        False,
        None,
    ),
}


@pytest.mark.parametrize(("snapshots", "over", "fact"), JUDGED.values(), ids=list(JUDGED))
def test_one_verdict_wins(snapshots, over, fact):
    verdict = judge(snapshots, returned=(), over=over)
    assert (verdict and verdict.fact) == fact
    kind = kit.DeadlockError if fact == STUCK else kit.MismatchError
    assert verdict is None or isinstance(verdict.error(), kind)


def creates(rank, group=TWO):
    return snapshot(rank, ("new_group", "new_group", 2, None), group=group)


def test_a_group_that_some_ranks_never_created_is_reported():
    error = judge([creates(0), snapshot(1)], returned=[0, 1], over=True).error()
    assert isinstance(error, kit.MismatchError)
    assert error.fact == "rank 0 calls new_group with [2], which rank 1 never called"
    assert error.absent == (1,)
    assert [one.rank for one in error.calls] == [0]
    assert "use_local_synchronization" in error.hint


def test_a_group_that_may_still_be_created_is_not_reported(monkeypatch):
    snapshots = [creates(0), snapshot(1)]
    assert judge(snapshots, returned=[0, 1], over=False) is None
    assert judge(snapshots, returned=[0], over=True) is None  # rank 1 has raised
    assert judge([creates(0), creates(1)], returned=[0, 1], over=True) is None
    alone = Group("new_group", (0,))  # of use_local_synchronization
    assert judge([creates(0, alone), snapshot(1)], returned=[0, 1], over=True) is None
    monkeypatch.setattr(Snapshot, "dropped", 1)  # the call may be among the older events
    assert judge(snapshots, returned=[0, 1], over=True) is None


def test_a_rank_that_has_returned_is_not_expected_to_send():
    waits, returned = snapshot(0, receives(1), waits=True), snapshot(1)
    assert judge([waits, returned], returned=[]) is None
    error = judge([waits, returned], returned=[1])
    assert error.fact.endswith("from rank 1, which has returned without sending it")


def test_nobody_is_stuck_if_not_everything_was_counted(monkeypatch):
    monkeypatch.setattr(board, "COUNTED", 0)
    crowded = snapshot(0, receives(1), waits=True)
    assert judge([crowded, BOTH_RECEIVE[1]], returned=()) is None


@pytest.mark.parametrize(
    ("elements", "long", "found"), [(4, True, True), (4, False, False), (1 << 20, True, False)]
)
def test_a_blocked_connection_is_reported_once_it_is_certain(elements, long, found):
    sends = ("send", "isend", 4, 1)
    ranks = [
        snapshot(0, sends, reduces(elements), waits=True),
        snapshot(1, receives(0), reduces(elements), waits=True, dropped=1),
    ]
    verdict = judge(ranks, returned=(), long=long)
    assert bool(verdict) == found
    if found:
        assert "rank 1 never waited for recv(src=0)" in str(verdict.error()).splitlines()
        assert [wait.op for wait in verdict.waits] == ["all_reduce"] * 2
