"""The milestones of project 1: the reference reaches them, and each mistake gets its hint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ddp_kit as kit
from ddp_kit.check import from_one_process_to_many as module

sys.path.append(str(Path(__file__).parents[1] / "check"))

from answers import assert_mistake, error_text

REFERENCE = Path(__file__).with_name("project_1.py")
START = Path(kit.__file__).parents[1] / "notebooks/projects/1_from_one_process_to_many.py"
STEPS = list(range(module.STEPS))
RIGHT = [(step, module.LOSSES.get(step, 2.0)) for step in STEPS]
KILLED = [*RIGHT[:15], *RIGHT[10:26], *RIGHT[20:37], *RIGHT[30:]]
TOKENS = module.STEPS * module.BATCH * module.CONTEXT
SPEED = {
    "ranks": 2,
    "tokens": TOKENS,
    "tokens_of_each_rank": [TOKENS // 2, TOKENS // 2],
    "seconds": 2.0,
    "tokens_per_second": TOKENS / 2,
    "communication_seconds": 0.5,
    "communication_share": 0.25,
}


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


def test_the_reference_survives_the_kills(capsys):
    kit.check.project_1(REFERENCE, milestone=3)
    assert "milestone 3: reached" in capsys.readouterr().out


@pytest.mark.long
def test_the_reference_reaches_all_milestones(capsys):
    kit.check.project_1(REFERENCE)
    assert capsys.readouterr().out.splitlines() == [
        "Project 1, milestone 1: reached, runs on 2 ranks of torchrun.",
        "Project 1, milestone 2: reached, equal losses on 1, 2 and 4 ranks.",
        "Project 1, milestone 3: reached, survives three kills.",
        "Project 1, milestone 4: reached, reports its speed.",
    ]


def test_the_start_does_not_reach_the_first_and_is_short():
    assert len(START.read_text("utf-8").splitlines()) <= 150
    assert "step 0 is printed twice" in error_text(kit.check.project_1, str(START))


def test_lines_that_ranks_write_into_one_another_are_told_apart(tmp_path):
    path = program(tmp_path, 'print("step 0 loss 2.5step 1 loss 2.5step 0 loss 2.5\\n")\n')
    assert "step 0 is printed twice" in error_text(kit.check.project_1, path)
    path = program(tmp_path, 'print("rank 1 step 0 loss 2.5")\n')
    assert "it prints no line such as" in error_text(kit.check.project_1, path)


def test_what_is_no_program_is_refused():
    def train():
        pass

    assert "expects the path of your program; got a value of type function" in error_text(
        kit.check.project_1, train
    )
    assert "there is no program none.py in this folder" in error_text(
        kit.check.project_1, "none.py"
    )
    with pytest.raises(kit.ExerciseError, match="milestone must be 1 to 4, got 5"):
        kit.check.project_1(START, milestone=5)
    with pytest.raises(kit.ExerciseError, match="a project has no printed solution"):
        kit.check.project_1(START, hint=4)


def test_an_error_is_shown_with_its_line(tmp_path):
    path = program(tmp_path, 'import os\n\nraise ValueError("no luck")\n')
    assert_mistake(
        kit.check.project_1,
        path,
        "raises",
        "project 1, on 2 ranks: it raised an error\n",
        'File "mine.py", line 3, in <module>',
        "ValueError: no luck",
    )


def test_a_program_that_never_ends_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 15.0)
    path = program(tmp_path, "import time\n\ntime.sleep(600)\n")
    assert_mistake(kit.check.project_1, path, "never ends", "did not finish within 15 s")
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def runs(monkeypatch):
    """Return what the runs of a program did: by the number of ranks, and "killed"."""
    found = {ranks: module.Training(RIGHT, SPEED, 0, 5.0) for ranks in (1, 2, 4)}
    found["killed"] = module.Training(KILLED, SPEED, len(module.KILLS), 5.0)

    def run_killed(grader, ranks, kills):
        grader.case = f"on {ranks} ranks"
        return found["killed" if kills else ranks]

    monkeypatch.setattr(module.TrainingGrader, "run_killed", run_killed)
    return found


def test_such_runs_reach_all_milestones(runs):
    assert kit.check.project_1(REFERENCE) == 1


@pytest.mark.parametrize(
    ("ranks", "step", "loss", "mistake"),
    [(2, 0, 2.6, "other loss"), (4, 1, 2.1, "other gradient"), (1, 30, 2.0, "other gradient")],
)
def test_other_losses_are_found(runs, ranks, step, loss, mistake):
    printed = [(s, loss if s == step else right) for s, right in RIGHT]
    runs[ranks] = runs[ranks]._replace(printed=printed)
    assert_mistake(kit.check.project_1, REFERENCE, mistake, f"step {step} should have the loss")


@pytest.mark.parametrize(
    ("printed", "mistake"),
    [
        ([], "no lines"),
        (RIGHT[:-1], "no lines"),
    ],
)
def test_missing_lines_are_found(runs, printed, mistake):
    runs[2] = runs[2]._replace(printed=printed)
    assert_mistake(kit.check.project_1, REFERENCE, mistake)


@pytest.mark.parametrize(
    ("printed", "mistake", "fact"),
    [
        ([*RIGHT[:15], *RIGHT[:26], *RIGHT], "from the beginning", "step 0 follows step 14"),
        ([*RIGHT[:15], *RIGHT[:27], *RIGHT[25:]], "too far back", "step 0 follows step 14"),
        ([*RIGHT[:15], *RIGHT[16:]], "steps left out", "step 16 follows step 14"),
        (KILLED[:-1], "steps left out", "the last step is 58"),
        ([*KILLED[:-1], (59, 1.9)], "something is not saved", "step 59 has the loss 1.9"),
    ],
)
def test_what_a_kill_costs_too_much_is_found(runs, printed, mistake, fact):
    runs["killed"] = runs["killed"]._replace(printed=printed)
    assert_mistake(kit.check.project_1, REFERENCE, mistake, fact)


@pytest.mark.parametrize(
    ("changed", "mistake"),
    [
        (None, "no report"),
        ({"seconds": None}, "no report"),
        ({"tokens": TOKENS // 2}, "not all tokens"),
        ({"tokens_of_each_rank": [TOKENS, TOKENS]}, "the whole batch"),
        ({"tokens_of_each_rank": [TOKENS]}, "not all tokens"),
        ({"communication_seconds": 0.0}, "no such times"),
        ({"seconds": 2000.0}, "no such times"),
        ({"communication_share": 25}, "sums disagree"),
        ({"tokens_per_second": 7.0}, "sums disagree"),
    ],
)
def test_a_report_that_cannot_be_is_found(runs, changed, mistake):
    runs[2] = runs[2]._replace(speed=None if changed is None else SPEED | changed)
    assert_mistake(kit.check.project_1, REFERENCE, mistake)
