"""The script of the first lesson with other workers, and the start method in a rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from kernels import FORKED
from scripts import text_of

import ddp_kit as kit

NAME = "00_start_here.py"


def run_with(world_size: int, old: str, new: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script on other ranks, in which a line of its worker is replaced."""
    source = text_of(NAME)
    changes = {"world_size = 4\n": f"world_size = {world_size}\n", old: new}
    for before, after in changes.items():
        assert source.count(before) == 1
        source = source.replace(before, after)
    script = folder / NAME
    script.write_text(source, "utf-8")
    return subprocess.run(
        [sys.executable, script],
        env=os.environ | FORKED,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_script_fails_when_a_rank_does(tmp_path):
    """The fixture of all tests fails this one if a rank is left.

    mp.spawn raises the error of the process that ends first, which may be a rank that only lost
    its connection to rank 2.
    """
    line = "    tensor = torch.tensor([rank])\n"
    out = run_with(3, line, line + "    assert rank != 2, 'no data left'\n", tmp_path)
    assert out.returncode == 1
    assert out.stdout == ""
    if "-- Process 2" in out.stderr:
        assert "AssertionError: no data left" in out.stderr
    else:
        assert re.search("-- Process [01] terminated with the following error", out.stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a fork is unsafe, and not chosen")
def test_a_rank_starts_its_own_processes_by_fork():
    result = kit.run(lambda rank, world_size: mp.get_start_method(), world_size=2)
    assert list(result) == ["fork", "fork"]
