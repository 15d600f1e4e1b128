"""The kit says what is wrong with wrong programs, and nothing about right ones: every tenth."""

from __future__ import annotations

import functools

import pytest
import with_kit
from program import NONE
from report import Judgement, judge
from suite import PROGRAMS, tenth

import ddp_kit as kit

LIMIT = 8.0  # seconds of a run in which the kit says nothing

# The programs of which the kit says nothing, or too much, or another class or other ranks.
REASONS = {
    "functional collectives, and so those of DTensor, are not recorded": [
        "full_tensor_on_rank_0_only",
        "redistribute_on_one_rank",
        "redistribute_to_other_placements",
        "local_parts_of_other_shapes",
        "sum_of_a_sharded_tensor_on_one_rank",
        "functional_all_reduce_skipped",
        "functional_all_reduce_of_other_shapes",
        "tensor_parallel_layer_called_by_one_rank",
        "tensor_parallel_with_other_batches",
        "sharded_weight_saved_on_rank_0",
        "sharded_norm_on_rank_0",
    ],
    "the all_reduce with which DDP finds unused parameters is not recorded": [
        "find_unused_parameters_on_one_rank",
    ],
    "gloo relays a broadcast through a rank that waits elsewhere": [
        "relay_through_a_rank_that_waits",
    ],
    "a message whose Work was dropped counts as posted": [
        "only_the_last_isend_is_waited_for",
        "batch_thrown_away_before_a_barrier",
        "isend_thrown_away_before_a_barrier",
    ],
    "the Work of a coalesced call is not watched": ["coalesced_all_reduce_never_waited_for"],
    "a collective that a rank has never joined is reported only if somebody waits in it": [
        "group_created_by_its_members_only",
    ],
}
KNOWN = {name: reason for reason, names in REASONS.items() for name in names}


def parameters():
    for program in tenth():
        reason = program.unseen or KNOWN.get(program.name)
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        yield pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", list(parameters()))
def test_a_program_is_judged_wrongly(program, tmp_path):
    file = program.write(tmp_path)
    run = functools.partial(kit.run, backend="gloo")
    report = with_kit.run(run, str(file), program.world_size, program.seconds, LIMIT)
    judged = judge(program, report)
    if program.is_right:
        assert report.kind == NONE, report.text
        return
    assert judged.outcome == "TP", f"not found: {program.source}"
    assert report.kind == program.expected, report.text
    assert judged.ranks, (program.marks, report.ranks, report.absent, report.text)


def test_a_program_has_no_name_or_mark_of_its_own():
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names))
    for program in PROGRAMS:
        compile(program.source, program.name, "exec")
        marks = program.marks
        ranks = {rank for lines in marks.values() for rank in lines}
        assert ranks <= set(range(program.world_size)), program.name
        assert bool(marks["fault"]) != program.is_right, program.name
    assert {name for name in KNOWN if name not in names} == set()


def test_a_report_is_judged_right_although_it_is_not(program_and_report):
    program, right, wrong = program_and_report
    assert judge(program, right) == Judgement("TP", True, True, True)
    for report, what in wrong:
        assert not getattr(judge(program, report), what), report


@pytest.fixture
def program_and_report():
    """A program, the report that is right, and reports that are wrong in one thing each."""
    from program import DEADLOCK, MISMATCH, program
    from report import Report

    body = """
    if rank != 1:
        dist.barrier()  # fault: 0, 2; absent: 1
    """
    one = program("skipped", "call matching", "Rank 1 skips it.", DEADLOCK, 3, body)
    lines = {0: [7], 2: [7]}
    return (
        one,
        Report(DEADLOCK, lines, [1]),
        [
            (Report(MISMATCH, lines, [1]), "kind"),
            (Report(DEADLOCK, lines, []), "ranks"),
            (Report(DEADLOCK, {0: [7]}, [1]), "ranks"),
            (Report(DEADLOCK, {0: [7], 1: [7], 2: [7]}, [1]), "ranks"),
            (Report(DEADLOCK, {0: [7], 2: [6]}, [1]), "lines"),
            (Report(DEADLOCK, {0: [7], 2: []}, [1]), "lines"),
        ],
    )
