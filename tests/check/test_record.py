"""Records: an answer has a score, three goals, and a picture beside the best known answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from answers import mistake, solved

import ddp_kit as kit
from ddp_kit.check import record

pytestmark = pytest.mark.usefixtures("forked_ranks")
CHECK = kit.check.exercise_2_9


best = solved("2.9")


def in_four_rounds(tensor):
    rank = dist.get_rank()
    sends = {0: (4, 1, 2, 3), 4: (5, 6, 7)}
    if rank:
        dist.recv(tensor, 4 if rank > 4 else 0)
    for dst in sends.get(rank, ()):
        dist.send(tensor, dst)


@mistake("2.9", "no goal", "right, but 7 rounds where at most 6 are the first goal")
def test_from_rank_0_alone(tensor):
    if dist.get_rank():
        dist.recv(tensor, 0)
    else:
        for dst in range(1, 8):
            dist.send(tensor, dst)


@mistake("2.9", "unchanged", "wrong result")
def test_nothing_is_sent(tensor):
    pass


@mistake("2.9", "other tensor", "wrong result")
def test_a_ring_of_neighbours(tensor):
    rank, mine = dist.get_rank(), tensor.clone()
    sending = dist.isend(mine, (rank + 1) % 8)
    dist.recv(tensor, (rank - 1) % 8)
    sending.wait()


def test_each_goal_is_worth_a_point(capsys):
    credit = CHECK(in_four_rounds)
    assert "Exercise 2.9: ★★☆ 4 rounds; the best known answer has 3." in capsys.readouterr().out
    assert list(credit.parts.values()) == [True, True, False]
    assert kit.check.credit(CHECK, in_four_rounds) == credit == pytest.approx(2 / 3)
    assert kit.check.credit(CHECK, lambda tensor: None) == 0


def test_the_picture_has_both_answers():
    lines = str(CHECK(in_four_rounds).picture).splitlines()
    assert [line.split("  ")[0] for line in lines[2::8]] == [
        "your answer: 4 rounds",
        "the best known: 3 rounds",
    ]
    assert lines[2].endswith("to 4 to 1 to 2 to 3")


def test_a_record_can_be_beaten(capsys, monkeypatch):
    slow = record.Score(5, [record.Span(0, 0, 5, "to 1")])
    monkeypatch.setattr(record, "_best", lambda task: slow)
    CHECK(in_four_rounds)
    said = capsys.readouterr().out
    assert "4 rounds; that beats the best known answer, which has 5." in said


def test_a_score_that_is_rounded_reaches_its_goal():
    task = replace(CHECK.exercise, goals=(6, 4, 3 - 1e-12))
    assert task.check(best, None) == 1
