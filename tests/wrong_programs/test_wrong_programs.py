"""The kit says what is wrong with wrong programs, and nothing about right ones.

`make test` has every twentieth program, `make long` another twentieth, `make verdicts` all.
"""

from __future__ import annotations

import functools

import pytest
import with_kit
from report import Judgement, Report, judge
from suite import DEADLOCK, MISMATCH, NONE, PROGRAMS, Program, tenth

import ddp_kit as kit
from ddp_kit.backends import mpi, shm

pytestmark = pytest.mark.usefixtures("forked_ranks")

LIMIT = 20.0  # seconds of a run in which the kit says nothing


def parameters():
    for number, program in enumerate(tenth()):
        marks = [pytest.mark.long] if number % 2 else []
        if program.unseen:
            marks.append(pytest.mark.xfail(strict=True, reason=program.unseen))
        yield pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", list(parameters()))
def test_the_verdict_about_a_program_is_right(program, tmp_path):
    is_judged(program, tmp_path, "gloo")


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("shm", "reduce_with_a_rank_that_waits"),
        ("shm", "wait_in_a_thread"),
        ("shm", "new_group_that_a_non_member_creates_later"),
        ("mpi", "new_group_that_a_non_member_creates_later"),
    ],
)
def test_the_verdict_about_a_program_is_right_on_another_backend(backend, name, tmp_path):
    if missing := {"shm": shm, "mpi": mpi}[backend].missing():
        pytest.skip(missing)
    is_judged(next(each for each in PROGRAMS if each.name == name), tmp_path, backend)


def is_judged(program, folder, backend):
    file = program.write(folder)
    run = functools.partial(kit.run, backend=backend)
    report = with_kit.run(run, str(file), program.world_size, program.seconds, LIMIT)
    judged = judge(program, report)
    if program.is_right:
        assert report.kind == NONE, report.text
        return
    assert judged.outcome == "TP", f"not found: {program.source}"
    assert report.kind == program.expected, report.text
    assert judged.ranks, (program.marks, report.ranks, report.absent, report.text)


def test_every_program_has_a_name_of_its_own_and_marks_of_its_ranks():
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names))
    for program in PROGRAMS:
        compile(program.source, program.name, "exec")
        marks = program.marks
        ranks = {rank for lines in marks.values() for rank in lines}
        assert ranks <= set(range(program.world_size)), program.name
        assert bool(marks["fault"]) != program.is_right, program.name


def test_a_report_is_right_if_its_kind_its_ranks_and_its_lines_are():
    body = "if rank != 1:\n    dist.barrier()  # fault: 0, 2; absent: 1\n"
    program = Program("skipped", "call matching", "Rank 1 skips it.", DEADLOCK, 3, body)
    lines = {0: [7], 2: [7]}
    assert judge(program, Report(DEADLOCK, lines, [1])) == Judgement("TP", True, True, True)
    for report, what in [
        (Report(MISMATCH, lines, [1]), "kind"),
        (Report(DEADLOCK, lines, []), "ranks"),
        (Report(DEADLOCK, {0: [7]}, [1]), "ranks"),
        (Report(DEADLOCK, {0: [7], 1: [7], 2: [7]}, [1]), "ranks"),
        (Report(DEADLOCK, {0: [7], 2: [6]}, [1]), "lines"),
        (Report(DEADLOCK, {0: [7], 2: []}, [1]), "lines"),
    ]:
        assert not getattr(judge(program, report), what), report
