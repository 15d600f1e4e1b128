"""The verdict on random programs, beside a machine that knows whether they end: no processes."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import configuration, given, note, settings
from hypothesis import strategies as st
from reference_executor import Machine, Tape, random_program

import ddp_kit as kit
from ddp_kit.verdict import RankState, deadlock, stuck


@pytest.fixture
def no_folder_is_left(tmp_path):
    configuration.set_hypothesis_home_dir(tmp_path)  # else it writes .hypothesis here


PROGRAMS = 4  # in one example: Hypothesis takes as long for one as the machine for four
TAPE = 110  # bytes: choices of one program, with the order in which its ranks run


def run_and_compare(machine: Machine, tape: Tape, seen: Counter) -> None:
    """Run a program in a random order and compare the verdict with what happens at every step."""
    named = {}
    while runnable := machine.runnable():
        machine.step(tape.one_of(runnable))
        late = machine.late() if tape.chance(50) else ()
        found = stuck(machine.states(late))
        assert set(found) == machine.hopeless(late), "a rank is missed, or called dead too soon"
        named |= {rank: machine.waits[rank] for rank in found}
        seen["stuck while others run"] += bool(found and machine.runnable())
    for rank, operation in named.items():
        if machine.away(operation.event):
            continue  # it may have left, but the collective never came to its end
        assert machine.waits[rank] is operation, "a false alarm: it went on"
        assert not operation.done, "a false alarm: what it waited for came"
    waiting = {rank for rank in range(len(machine.program)) if machine.is_waiting(rank)}
    states = machine.states()
    found = stuck(states)
    assert set(found) == waiting, "the run has stopped: every waiting rank is stuck"
    verdict = deadlock(states)
    assert (verdict is None) == (not waiting)
    error = verdict and verdict.error()
    if isinstance(error, kit.DeadlockError):
        assert {wait.rank: wait.peers for wait in error.waits} == found
        assert_true(error.fact, {state.rank: state for state in states})
    seen["programs"] += 1
    seen[type(error).__name__] += 1


def assert_true(fact: str, at: dict[int, RankState]) -> None:
    """Check every clause of a fact against the states that it describes."""
    doing = {r: s.waits_for for r, s in at.items() if s.waits_for}
    kinds = set()
    for who, peer in re.findall(r"rank (\d+) waits until rank (\d+) receives", fact):
        assert (doing[int(who)].kind, doing[int(who)].peer) == ("send", int(peer))
        kinds.add("send")
    message = r"a (?:\d+\w\w )?message (?:with tag \d+ )?from "
    for who, peer in re.findall(rf"rank (\d+) waits for (?:{message})?rank (\d+)", fact):
        event = doing[int(who)]
        assert event.kind == "recv"
        assert event.peer == int(peer) or set(event.group.ranks) == {int(who), int(peer)}
        kinds.add("recv")
    kinds |= {"collective"} if " in all_reduce" in fact or " in broadcast" in fact else set()
    ending = re.search(r"can ever (.*)$", fact)
    if ending:
        assert kinds == {"send": {"recv"}, "receive": {"send"}}.get(ending[1], kinds)
    gone = re.findall(r"(ranks? [\d, and]*\d), which (?:\w+ \d+ (?:of these )?and )?ha", fact)
    gone += re.findall(r"but (ranks? [\d, and]*\d) ha", fact)
    assert {at[int(r)].status for r in re.findall(r"\d+", " ".join(gone))} <= {"returned"}
    assert bool(gone) == ("returned" in fact)
    counted = re.search(r" a (\d+)\w\w message .*which (received|sent) (\d+)", fact)
    if counted:
        src, dst = map(int, re.findall(r"rank (\d+)", fact)[:: -1 if "from" in fact else 1])
        event = doing[src if counted[2] == "received" else dst]
        channel = src, dst, event.tag, event.group
        posted = at[dst].recvs if counted[2] == "received" else at[src].sends
        assert posted[channel] == int(counted[3]) < int(counted[1])
        nth = event.sequence if event.peer is not None else at[dst].recvs[channel]
        assert int(counted[1]) == nth + 1
    for src, dst, tag in re.findall(r"rank (\d+) sends to rank (\d+) with tag (\d+), but", fact):
        event = doing[int(dst)]
        assert event.kind == "recv"
        assert event.tag != int(tag)
        sent = [c for c in at[int(src)].sends if c[:3] == (int(src), int(dst), int(tag))]
        assert any(at[int(src)].sends[c] > at[int(dst)].recvs.get(c, 0) for c in sent)


@pytest.mark.usefixtures("no_folder_is_left")
def test_a_random_program_is_judged_rightly():
    seen = Counter()

    @settings(max_examples=2600, deadline=None, derandomize=True, database=None)
    @given(st.binary(min_size=PROGRAMS * TAPE, max_size=PROGRAMS * TAPE))
    def check(data):
        for start in range(0, len(data), TAPE):
            tape = Tape(data[start : start + TAPE])
            machine = Machine(random_program(tape, tape.one_of(["", "cpu:gloo"])))
            try:
                run_and_compare(machine, tape, seen)
            except BaseException:
                note(f"{machine.program} in the order {machine.order}")
                raise

    check()
    assert seen["programs"] >= 10_000
    assert seen["NoneType"] >= 3_000  # they ended
    assert seen["DeadlockError"] >= 3_000
    assert seen["stuck while others run"] >= 2_000
