"""Every lesson on two hosts of two ranks each, and some on two hosts of one rank each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lessons.test_every_lesson import PROOFS, QUICKLY
from torchrun import Torchrun

import ddp_kit as kit

EVERY_LESSON = str(Path(__file__).with_name("every_lesson.py"))
# What the agents do differently matters only for lessons that look at it, and for any other one.
STATIC = ("your_machine", "init_methods", "torchrun", "ring_allreduce")


@pytest.mark.usefixtures("forked_torchrun")
@pytest.mark.parametrize(
    ("rendezvous", "per_host", "folder", "names"),
    [("c10d", 2, "shared", tuple(PROOFS)), ("static", 1, "host-{host}", STATIC)],
    ids=["c10d", "static"],
)
def test_a_lesson_fails_across_hosts_or_its_trace_has_gaps(
    rendezvous, per_host, folder, names, hosts, tmp_path
):
    """All in one start, because a start takes seconds."""
    expected = "".join(PROOFS[name].format(f"{2 * per_host} ranks") for name in names)
    lessons = [" ".join([name, *QUICKLY.get(name, [])]) for name in names]
    program = [EVERY_LESSON, str(tmp_path / folder), *lessons]
    output, how = tmp_path / "output", {"rendezvous": rendezvous, "per_host": per_host}
    run = Torchrun(hosts, output, *program, **how)
    codes = run.wait(900)
    assert (codes, run.printed("out")) == ([0, 0], [expected, ""]), run.printed("err")
    for number in (0, 1):  # as the README says for hosts that share no folder
        if folder != "shared":
            parts = tmp_path / folder.format(host=number)
            shutil.copytree(parts, tmp_path / "shared", dirs_exist_ok=True)
    for name in names:
        assert kit.load_trace(tmp_path / "shared" / name).world_size == 2 * per_host
