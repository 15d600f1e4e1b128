"""The class view: what a check records, what it never records, and what a teacher sees."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit import progress_file
from ddp_kit.check.hints import find
from ddp_kit.course.__main__ import main


def right(tensor, src):
    requests = []
    if dist.get_rank() == src:
        others = (rank for rank in range(dist.get_world_size()) if rank != src)
        requests = [dist.isend(tensor, rank) for rank in others]
    else:
        dist.recv(tensor, src)
    for request in requests:
        request.wait()


def wrong(tensor, src):
    pass


def deadlocked(tensor, src):
    dist.recv(tensor, (dist.get_rank() + 1) % dist.get_world_size())


def stub(tensor, src):
    raise NotImplementedError("Exercise 2.1: send")


@pytest.fixture
def recorded(tmp_path, monkeypatch) -> Path:
    """The file to which checks add their lines."""
    monkeypatch.setattr(progress_file, "_refused", set())
    monkeypatch.delenv("DDP_KIT_LEARNER", raising=False)
    monkeypatch.setenv("DDP_KIT_PROGRESS", str(tmp_path / "progress.jsonl"))
    return tmp_path / "progress.jsonl"


def check(answer) -> None:
    with suppress(kit.ExerciseError, NotImplementedError):
        kit.check.exercise_2_1(answer)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("forked_ranks")
def test_a_check_records_what_happened(recorded, monkeypatch):
    check(stub)
    check(wrong)
    check(deadlocked)
    monkeypatch.setenv("DDP_KIT_LEARNER", "ada")
    check(right)
    found = lines(recorded)
    assert all(line.pop("seconds") >= 0 for line in found)
    assert all(line.pop("parts", {"a part": True}) for line in found)
    mistakes = [line.pop("mistake", "") for line in found]
    assert found == [
        {"exercise": "2.1", "passed": False, "error": "NotImplementedError"},
        {"exercise": "2.1", "passed": False, "error": "ExerciseError"},
        {"exercise": "2.1", "passed": False, "error": "ExerciseError"},
        {"exercise": "2.1", "passed": True, "learner": "ada"},
    ]
    assert (mistakes[0], mistakes[3]) == ("", "")
    assert mistakes[1] == find("2.1", "unchanged").mistake
    with pytest.raises(kit.ExerciseError) as caught:
        kit.check.exercise_2_1(deadlocked)
    assert mistakes[2] == caught.value.error.hint


@pytest.mark.usefixtures("forked_ranks")
def test_partial_credit_records_one_line_with_its_parts(recorded):
    found = kit.check.credit(kit.check.exercise_2_1, wrong)
    (line,) = lines(recorded)
    assert (line["exercise"], line["passed"], line["parts"]) == ("2.1", False, found.parts)
    assert line["mistake"] == find("2.1", "unchanged").mistake


def test_a_check_records_nothing_where_no_file_is_named(monkeypatch):
    monkeypatch.delenv("DDP_KIT_PROGRESS", raising=False)
    monkeypatch.setattr(progress_file, "_append", lambda *given: pytest.fail("recorded"))
    check(None)


def test_a_hint_that_names_a_variable_is_not_recorded(recorded):
    error = kit.RankError({}, ())
    error.hint = "secret is defined in the notebook, but not on the ranks"
    with pytest.raises(kit.RankError), progress_file.recording("%%ranks"):
        raise error
    assert "secret" not in recorded.read_text()


def test_a_file_that_cannot_be_written_is_reported_once_and_stops_no_check(
    recorded, monkeypatch, capsys
):
    for path in (recorded.parent, recorded / "inside" / "nothing"):
        monkeypatch.setenv("DDP_KIT_PROGRESS", str(path))
        for _ in range(2):
            with pytest.raises(kit.ExerciseError):
                kit.check.exercise_2_1(None)
        (sentence,) = capsys.readouterr().err.splitlines()
        assert sentence.startswith(f"DDP_KIT_PROGRESS: nothing is recorded in {path}: ")


def test_a_teacher_sees_the_numbers_that_were_recorded(tmp_path, capsys):
    def line(exercise: str, passed: bool, **more) -> str:
        return json.dumps({"exercise": exercise, "passed": passed, "seconds": 2.0, **more}) + "\n"

    stuck = line(
        "10.1", False, mistake="They are not counted.", parts={"on 2 ranks": True, "on 3": False}
    )
    grace = line("2.1", False, mistake="It receives first.") + line("2.1", True)
    grace += line("2.1", False) + line("2.1", True)
    (tmp_path / "ada.jsonl").write_text(stuck + stuck + line("2.1", True) + "nonsense\n[]\n")
    (tmp_path / "room.jsonl").write_text(line("%%ranks", True, learner="tony") + grace)
    assert main(["progress", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 learners",
        "exercise  learners  passed  checks  seconds  not yet",
        "2.1       2         2       1.5     2.0",
        "10.1      1         0               2.0      ada",
        "",
        "checks: until the first that passed, median of those who passed.",
        "seconds: one check takes, median.",
        "",
        "The checks of each learner; in brackets, without one that passed",
        "      2.1  10.1",
        "ada   1    (2)",
        "room  2",
        "tony",
        "",
        "%%ranks: 1 cell of 1 learner.",
        "",
        "Mistakes made most",
        "   2      10.1  They are not counted.",
        "   1       2.1  It receives first.",
        "",
        "Parts missed most",
        "   2      10.1  on 3",
        "",
        "2 lines left out: not written by a check.",
    ]


def test_a_line_that_no_check_writes_is_left_out_and_harms_no_terminal(tmp_path, capsys):
    def line(**changes) -> str:
        right = {"exercise": "2.1", "passed": False, "seconds": 1.0}
        return json.dumps(right | changes) + "\n"

    names = "\x1b[31mred\nline", "$x_{$", "\ud800", "字", "x" * 3000
    shown = sorted(["?[31mred line", "$x_{$", "?", "字", "x" * 39 + "…"])
    junk = [line(exercise="-1"), line(exercise="9" * 4000)]
    junk += [line(exercise=2.1), "[" * 100_000 + "\n"]
    made = line(learner="$x_{$", mistake="\x1b[2Jgone", parts={"\x1b[2Jpart": False})
    text = "".join([*(line(learner=name) for name in names), *junk, made])
    (tmp_path / "room.jsonl").write_text(text)
    assert main(["progress", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"2.1       5         0               1.0      {', '.join(shown)}\n" in out
    assert "   1       2.1  ?[2Jgone\n" in out
    assert "   1       2.1  ?[2Jpart\n" in out
    assert "\n4 lines left out: not written by a check.\n" in out


def test_a_folder_without_checks_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("nonsense\n")
    for folder, reason in [
        (tmp_path, "has no line of a check"),
        (tmp_path / "none", "is not a folder"),
    ]:
        assert main(["progress", str(folder)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert reason in err
