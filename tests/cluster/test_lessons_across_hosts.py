"""Every lesson on two hosts of two ranks each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lessons.test_every_lesson import PROOFS, QUICKLY
from torchrun import Torchrun

import ddp_kit as kit

EVERY_LESSON = str(Path(__file__).with_name("every_lesson.py"))
EXPECTED = "".join(line.format("4 ranks") for line in PROOFS.values())


@pytest.mark.parametrize(
    ("rendezvous", "folder"),
    [("c10d", "shared"), ("static", "host-{host}")],
    ids=["c10d", "static"],
)
def test_a_lesson_fails_across_hosts_or_its_trace_has_gaps(rendezvous, folder, hosts, tmp_path):
    """All in one start, because a start takes seconds."""
    lessons = [" ".join([name, *QUICKLY.get(name, [])]) for name in PROOFS]
    program = [EVERY_LESSON, str(tmp_path / folder), *lessons]
    run = Torchrun(hosts, tmp_path / "output", *program, rendezvous=rendezvous)
    codes = run.wait(180)
    assert (codes, run.printed("out")) == ([0, 0], [EXPECTED, ""]), run.printed("err")
    for number in (0, 1):  # as the README says for hosts that share no folder
        if folder != "shared":
            parts = tmp_path / folder.format(host=number)
            shutil.copytree(parts, tmp_path / "shared", dirs_exist_ok=True)
    for name in PROOFS:
        assert kit.load_trace(tmp_path / "shared" / name).world_size == 4
