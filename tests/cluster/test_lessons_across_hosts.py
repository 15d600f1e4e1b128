"""Every lesson on two hosts of two ranks each, and some on two hosts of one rank each."""

from __future__ import annotations

import shutil

import pytest
from lessons.test_every_lesson import PROOFS
from torchrun import Torchrun

import ddp_kit as kit

# Runs lessons, one after the other: `torchrun every_lesson.py FOLDER NAME...`. Each writes its
# trace into a folder of its own.
EVERY_LESSON = """
import sys
from importlib import import_module

folder, *names = sys.argv[1:]
for name in names:
    import_module(f"ddp_kit.lessons.{name}").main(["--trace", f"{folder}/{name}"])
"""
# What the agents do differently matters only for lessons that look at it, and for any other one.
STATIC = ("your_machine", "init_methods", "torchrun", "ring_allreduce")


@pytest.mark.usefixtures("forked_torchrun")
@pytest.mark.parametrize(
    ("rendezvous", "per_host", "folder", "names"),
    [("c10d", 2, "shared", tuple(PROOFS)), ("static", 1, "host-{host}", STATIC)],
    ids=["c10d", "static"],
)
def test_lessons_run_across_hosts_and_their_traces_are_whole(
    rendezvous, per_host, folder, names, hosts, tmp_path
):
    """All in one start, because a start takes seconds."""
    expected = "".join(PROOFS[name].format(f"{2 * per_host} ranks") for name in names)
    script = tmp_path / "every_lesson.py"
    script.write_text(EVERY_LESSON)
    program = [str(script), str(tmp_path / folder), *names]
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
