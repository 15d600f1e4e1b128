"""Partial credit: which parts of an exercise hold for answers that are right in part."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path

import answers
import pytest
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.check.compared import defined
from ddp_kit.check.grader import Credit, Grader
from ddp_kit.check.hints import solutions as hunts
from ddp_kit.course.cells import hunted, solved

sys.path.append(str(Path(__file__).parents[1] / "course"))

from grading_tools import NOTEBOOKS, exercises_of, sources
from half_right import ANSWERS, changed

pytestmark = pytest.mark.usefixtures("forked_ranks")
broadcast = answers.solved("2.1")
SENT = "no more is sent than needed"
QUICK = (
    "exercise_2_1",
    "exercise_2_9",
    "exercise_3_3",
    "exercise_4_1",
    "exercise_6_2",
    "exercise_12_1",
    "exercise_15_1",
)


@pytest.fixture(autouse=True)
def long_limit(monkeypatch):
    monkeypatch.setenv("DDP_KIT_CHECK_SECONDS", "300")


def test_a_right_answer_has_all_parts(capsys):
    credit = kit.check.exercise_2_1(broadcast)
    shown = capsys.readouterr().out
    assert (credit, type(credit)) == (1.0, Credit)
    assert credit.parts == {"src=0": True, "every other src": True, SENT: True}
    again = kit.check.credit(kit.check.exercise_2_1, broadcast)
    assert (again, again.parts, again.wrong) == (1.0, credit.parts, {})
    assert capsys.readouterr().out == shown
    assert credit._ipython_display_() is None
    copy = pickle.loads(pickle.dumps(credit))
    assert (copy, copy.parts) == (credit, credit.parts)


def test_what_is_said_meanwhile_costs_no_points_in_nbgrader(capsys, monkeypatch):
    before = Grader.try_case

    def with_a_warning(grader, number):
        print("building the font cache", file=sys.stderr)
        before(grader, number)

    monkeypatch.setattr(Grader, "try_case", with_a_warning)
    assert kit.check.credit(kit.check.exercise_2_1, broadcast) == 1
    shown = capsys.readouterr()
    assert "font cache" in shown.out
    assert shown.err == ""


def test_an_error_has_its_credit():
    def only_from_0(tensor, src):
        broadcast(tensor, 0)

    with pytest.raises(kit.ExerciseError) as caught:
        kit.check.exercise_2_1(only_from_0)
    assert caught.value.credit == 0  # other cases with src=0 were still to come
    assert caught.value.credit.parts == {"src=0": False, "every other src": False, SENT: False}
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.credit.parts == caught.value.credit.parts


def test_a_part_that_needs_right_results_fails_with_one_of_them(capsys):
    def all_but_the_last_of_five(tensor, src):
        if dist.get_world_size() == 5 and src == 4:
            return
        broadcast(tensor, src)

    credit = kit.check.credit(kit.check.exercise_2_1, all_but_the_last_of_five)
    assert credit.parts == {"src=0": True, "every other src": False, SENT: False}
    assert list(credit.wrong) == ["every other src"]
    said, *parts = capsys.readouterr().out.rsplit("\n", 4)[:4]
    assert said.startswith("exercise 2.1, broadcast(tensor, src=4) on 5 ranks: wrong result\n")
    assert parts == ["yes src=0", "no  every other src", f"no  {SENT}"]


def test_a_wasteful_answer_loses_one_part(capsys):
    def twice(tensor, src):
        print("src is", src)
        broadcast(tensor, src)
        broadcast(tensor, src)

    credit = kit.check.credit(kit.check.exercise_2_1, twice)
    assert credit.parts == {"src=0": True, "every other src": True, SENT: False}
    assert "20 are enough" in credit.wrong[SENT]
    assert capsys.readouterr().out.count("src is") == 2  # of the first run that sent too much


def test_a_hunt_that_still_sends_too_much_has_no_points():
    train = defined("8.7", hunts()["8.7"]["broken"], "train")
    assert kit.check.credit(kit.check.exercise_8_7, train) == 0


def test_a_stub_has_no_points_though_its_gap_is_not_always_reached():
    def gap(tensor, src):
        if dist.get_world_size() == 4:
            raise NotImplementedError("Exercise 2.1: send")
        broadcast(tensor, src)

    def of_nbgrader(tensor, src):
        raise NotImplementedError

    for stub in (gap, of_nbgrader):
        credit = kit.check.credit(kit.check.exercise_2_1, stub)
        assert (credit, len(credit.parts)) == (0.0, 3)


@pytest.mark.parametrize("answer", [None, lambda tensor: None])
def test_an_answer_that_cannot_be_called_has_no_points(answer):
    assert kit.check.credit(kit.check.exercise_2_1, answer) == 0.0


@pytest.mark.parametrize("seconds", ["soon", "0", "inf"])
def test_a_limit_that_is_no_time_is_refused(seconds, monkeypatch):
    monkeypatch.setenv("DDP_KIT_CHECK_SECONDS", seconds)
    with pytest.raises(kit.ExerciseError) as caught:
        kit.check.credit(kit.check.exercise_2_1, broadcast)
    assert str(caught.value) == f"DDP_KIT_CHECK_SECONDS must be a number above 0, got '{seconds}'"


def test_an_answer_that_never_ends_is_stopped_at_the_limit(monkeypatch):
    def endless(tensor, src):
        if dist.get_world_size() > 1:
            while True:
                pass

    monkeypatch.setenv("DDP_KIT_CHECK_SECONDS", "3")
    begin = time.monotonic()
    credit = kit.check.credit(kit.check.exercise_2_1, endless)
    assert credit == 0.0
    assert time.monotonic() - begin < 45  # each run alone may take 60 s
    assert "it did not finish in time" in credit.wrong["src=0"]
    assert "there was no time left for it" in credit.wrong["every other src"]


def test_a_rank_that_dies_costs_its_part():
    def dies(tensor, src):
        if src == 1:
            os._exit(1)
        broadcast(tensor, src)

    credit = kit.check.credit(kit.check.exercise_2_1, dies)
    assert credit.parts == {"src=0": True, "every other src": False, SENT: False}
    assert kit.check.credit(kit.check.exercise_2_1, broadcast) == 1.0


def breaks_the_kit(tensor, src):
    from ddp_kit.trace.rank import recorded_functions

    broadcast(tensor, src)
    recorded_functions.Recorder = None


def replaces_torch(tensor, src):
    dist.send = lambda *args: None
    dist.recv = lambda *args: 0


def leaves(tensor, src):
    sys.exit(0)


@pytest.mark.parametrize("answer", [breaks_the_kit, replaces_torch, leaves])
def test_an_answer_that_breaks_something_costs_only_its_own_points(answer):
    assert kit.check.credit(kit.check.exercise_2_1, answer) < 1.0
    kit.shutdown()  # a grading tool runs each learner's notebook in a kernel of its own
    assert kit.check.credit(kit.check.exercise_2_1, broadcast) == 1.0


def test_an_exercise_has_at_most_six_parts():
    for name in kit.check.__all__:
        if name != "credit":
            assert 1 <= len(getattr(kit.check, name).exercise.parts) <= 6, name


@pytest.mark.parametrize(
    "exercise",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ANSWERS],
)
def test_a_half_right_answer_gets_its_points(exercise, tmp_path):
    name = next(
        path.stem for path in NOTEBOOKS.glob(f"exercises/{int(exercise.split('_')[1]):02}*")
    )
    solutions, gaps = sources("solutions", name), exercises_of(name)
    cells = json.loads((NOTEBOOKS / "exercises" / f"{name}.ipynb").read_text("utf-8"))["cells"]
    kinds = {cell["id"]: cell["cell_type"] for cell in cells}
    names = {"__name__": "__main__"}
    for cell in kinds:
        source = solutions[cell]
        if gaps.get(cell) == exercise and "kit.check" in source:
            break
        if gaps.get(cell) == exercise:
            number = hunted(source)
            source = changed(exercise, hunts()[number]["solution"] if number else solved(source))
        if kinds[cell] != "code" or "kit.check" in source:
            continue
        file = tmp_path / f"{cell}.py"
        file.write_text(source.split("\nkit.run(")[0], "utf-8")
        exec(compile(file.read_text("utf-8"), file, "exec"), names)
    answer = names[source.split("(")[1].rstrip(")")]
    credit = kit.check.credit(getattr(kit.check, exercise), answer)
    assert sum(credit.parts.values()) == ANSWERS[exercise][2], credit.parts


def test_of_a_long_output_the_middle_is_not_shown(capsys):
    def chatty(tensor, src):
        print("first", *["line"] * 10_000, "last")

    with pytest.raises(kit.ExerciseError):
        kit.check.exercise_2_1(chatty)
    shown = capsys.readouterr().out
    assert len(shown) < 11_000
    assert "characters left out]" in shown
    assert shown.startswith("[rank 0] first line")
    assert shown.endswith("line last\n")
