"""The training program that learners take home: alone, under torchrun, saved and resumed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kernels import QUICK_START

import ddp_kit as kit

SCRIPT = Path(__file__).resolve().parents[2] / "notebooks" / "scripts" / "train.py"
DIGITS = Path(kit.__file__).parent / "lessons" / "data" / "digits"
# What the kit or a launcher may have set, and a learner's shell has not.
UNSET = re.compile(r"MASTER_|RANK$|LOCAL_RANK$|WORLD_SIZE$|GLOO_|DDP_KIT|PYTHON")
LIMIT = 300  # seconds for one run
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def train(*options: object, ranks: int = 0) -> subprocess.CompletedProcess:
    """Run the program as python runs it, or on some ranks of torchrun, on one thread a rank."""
    launcher = [*TORCHRUN, str(ranks)] if ranks else []
    environment = {key: value for key, value in os.environ.items() if not UNSET.match(key)}
    environment |= QUICK_START | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), *map(str, options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.terminate()  # torchrun then ends its ranks
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def lines_of(run: subprocess.CompletedProcess) -> list[str]:
    return run.stdout.splitlines()


def percents(lines: list[str], epochs: list[int]) -> list[float]:
    """Return the accuracies that were printed, and check that they are of these epochs."""
    found = [re.fullmatch(r"epoch (\d+): ([\d.]+)% right \(.+\)", line) for line in lines]
    assert all(found), lines
    assert [int(match[1]) for match in found] == epochs
    return [float(match[2]) for match in found]


def weights(checkpoint: Path) -> torch.Tensor:
    """Return the weights of a network of a checkpoint as one tensor, in the order of names."""
    shapes = {"0.weight": (16, 1, 5, 5), "0.bias": (16,), "3.weight": (10, 2304), "3.bias": (10,)}
    loaded = {name: torch.zeros(shape) for name, shape in shapes.items()}
    dcp.load({"model_state_dict": loaded}, checkpoint_id=checkpoint, no_dist=True)
    return torch.cat([tensor.flatten() for tensor in loaded.values()])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_four_ranks_save_and_two_resume_as_one_process_trains(tmp_path):
    """Each step has 100 digits in all three runs, the same ones: only rounding differs."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    data = ["--data", DIGITS, "--lr", 0.02]
    alone = train(*data, "--batch-size", 100, "--epochs", 2, "--checkpoint", whole)
    four = train(*data, "--batch-size", 25, "--epochs", 1, "--checkpoint", parts, ranks=4)
    more = ["--epochs", 2, "--accumulate", 2, "--checkpoint", parts]
    two = train(*data, "--batch-size", 25, *more, ranks=2)
    for run, ranks in (alone, 1), (four, 4), (two, 2):
        assert run.returncode == 0, run.stderr
        assert all(line.endswith(f"(world size {ranks}, MNIST)") for line in lines_of(run))

    lines = [lines_of(run) for run in (alone, four, two)]
    reference = percents(lines[0], [1, 2])
    resumed = percents(lines[1], [1]) + percents(lines[2], [2])
    assert reference[1] > 85
    assert resumed == pytest.approx(reference, abs=0.11)  # 0.05 is one digit of 2,000
    for epoch in ("0001", "0002"):
        difference = weights(parts / epoch) - weights(whole / epoch)
        assert difference.abs().max() < 1e-3, epoch  # the largest weight is about 0.5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_last_group_of_an_epoch_counts_less(tmp_path):
    """10,000 digits: the second step has 4,000, here as one batch, there as two of 2,000."""
    data = ["--data", DIGITS, "--epochs", 1]
    one = train(*data, "--batch-size", 6000, "--checkpoint", tmp_path / "one")
    parts = ["--batch-size", 2000, "--accumulate", 3]
    many = train(*data, *parts, "--checkpoint", tmp_path / "many")
    for run in one, many:
        assert run.returncode == 0, run.stderr
    difference = weights(tmp_path / "one" / "0001") - weights(tmp_path / "many" / "0001")
    assert difference.abs().max() < 1e-4  # only rounding


def test_a_step_without_a_batch_is_refused_in_one_line():
    run = train("--accumulate", 0)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == "train.py: error: --accumulate must be at least 1, got 0"


def test_without_data_it_says_so_and_learns():
    run = train("--epochs", 2)
    assert run.returncode == 0, run.stderr
    assert all(line.endswith("(world size 1, made-up digits)") for line in lines_of(run))
    assert percents(lines_of(run), [1, 2])[1] > 60


def test_a_folder_without_digits_is_named_with_the_missing_file(tmp_path):
    run = train("--data", tmp_path)
    assert run.returncode == 1
    expected = f"No such file or directory: '{tmp_path}/train-images-idx3-ubyte.gz'"
    assert expected in run.stderr.splitlines()[-1]
