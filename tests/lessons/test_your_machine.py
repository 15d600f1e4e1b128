"""The environment of a rank, and the exits of synchronize."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from processes import wait_until
from scripts import text_of

import ddp_kit as kit
from ddp_kit.lessons import your_machine

SCRIPT = "05_your_machine.py"


def test_synchronize_says_why_it_does_not_wait(monkeypatch):
    assert your_machine.synchronize() == "there is no process group"
    assert list(kit.run(your_machine.everywhere, world_size=1)) == ["the world is one rank"]
    assert list(kit.run(your_machine.everywhere, world_size=2)) == ["all ranks are here"] * 2
    assert not torch.distributed.is_initialized()
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert your_machine.synchronize() == "torch has no distributed package"


def launched(folder: Path, *options: str, before: str = "") -> list[str]:
    """Return what the script of the lesson prints on ranks of torchrun, which see no GPU.

    before: lines that run before those of the script.
    """
    script = folder / SCRIPT
    script.write_text(before + text_of(SCRIPT), "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, str(script)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables)
    assert (out.returncode, out.stderr) == (0, "")
    return out.stdout.splitlines()


@pytest.mark.usefixtures("forked_torchrun")
def test_a_worker_says_the_same_in_the_kit_and_in_the_script_under_torchrun(tmp_path):
    result = kit.run(lambda rank, world_size: your_machine.introduce(), world_size=3)
    assert result[1] == "rank 1 of 3, local rank 1, sum of all ranks 3"
    assert launched(tmp_path, "--nproc-per-node", "3") == list(result), "in the order of the ranks"


@pytest.mark.usefixtures("forked_torchrun")
def test_ranks_that_share_a_gpu_stay_on_the_cpu(tmp_path):
    """To choose the GPU would raise an error here."""
    one_gpu = "import torch\n\ntorch.cuda.device_count = lambda: 1\n"
    lines = launched(tmp_path, "--nproc-per-node", "2", before=one_gpu)
    assert lines == [f"rank {r} of 2, local rank {r}, sum of all ranks 1" for r in (0, 1)]


def test_programs_run_side_by_side_and_their_lines_are_sorted():
    one, two = (f'"{sys.executable}" -c "import sys; sys.exit(print({n}))"' for n in (2, 1))
    assert your_machine.side_by_side(one, two) == ["1", "2"]
    assert your_machine.side_by_side("printf '2\\n1'", in_order=True) == ["2", "1"]
    complains = f'"{sys.executable}" -c "import sys; sys.exit(7 * 6)"'.replace("7 * 6", "'no'")
    assert your_machine.side_by_side(complains) == []
    assert your_machine.side_by_side(complains, errors=True) == ["no"]


def test_programs_that_do_not_end_are_ended_with_what_they_started():
    """The fixture of all tests fails this one if a process is left."""
    starts = "import subprocess; subprocess.run(['sleep', '60'])"
    with pytest.raises(TimeoutError, match="did not end within 1 s"):
        your_machine.side_by_side(f'"{sys.executable}" -c "{starts}"', seconds=1)


def test_an_interrupt_ends_the_programs_too():
    pid = os.getpid()
    later = f"import os, time; time.sleep(1); os.kill({pid}, 2); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        your_machine.side_by_side(f'"{sys.executable}" -c "{later}"')


def test_a_missing_program_leaves_none_of_the_others():
    with pytest.raises(FileNotFoundError):
        your_machine.side_by_side("sleep 60", "no-such-program")


def test_what_a_program_leaves_behind_is_ended_too():
    command = ["sleep", f"61.{os.getpid()}"]  # nobody else has one
    your_machine.side_by_side(f"sh -c '{' '.join(command)} > /dev/null & echo hi'")

    def gone():  # a killed process ends once it is scheduled
        return command not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]

    wait_until(gone, 50, "the program's child ends")  # by itself, it would end after 61 s
