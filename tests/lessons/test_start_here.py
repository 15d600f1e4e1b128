"""The scripts of the first lesson when a rank fails, and the start method in a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp

import ddp_kit as kit

SCRIPTS = Path(__file__).parents[2] / "notebooks" / "scripts"


@pytest.mark.parametrize("name", ["00_start_here.py", "00_mp_spawn.py"])
def test_a_script_fails_when_a_rank_does(name, tmp_path):
    """The fixture of all tests fails this one if a rank is left."""
    source = (SCRIPTS / name).read_text()
    line = "    tensor = torch.tensor([rank])\n"
    assert source.count(line) == 1
    script = tmp_path / name
    script.write_text(source.replace(line, line + "    assert rank != 2, 'no data left'\n"))
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert out.returncode == 1
    assert out.stdout == ""
    assert "AssertionError: no data left" in out.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a fork is unsafe, and not chosen")
def test_a_rank_starts_its_own_processes_by_fork():
    result = kit.run(lambda rank, world_size: mp.get_start_method(), world_size=2)
    assert list(result) == ["fork", "fork"]
