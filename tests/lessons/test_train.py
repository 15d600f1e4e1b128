"""The training program that learners start from: on any number of ranks, stopped and resumed."""

from __future__ import annotations

import re
import runpy
import signal
import subprocess

import psutil
import pytest
from programs import LIMIT, SCRIPTS, started, train

TEXT = SCRIPTS.parents[1] / "ddp_kit" / "lessons" / "data" / "text" / "pride_and_prejudice.txt"
SMALL = "--data", TEXT, "--layers", 1, "--width", 32, "--batch-size", 16, "--warmup", 2
LINE = re.compile(r"step (\d+): loss ([\d.]+), norm [\d.]+, [\d,]+ tokens/s(, MFU [\d.]+%)?")
HELD_OUT = re.compile(r"step (\d+): loss ([\d.]+) on held-out text")


def losses(run: subprocess.CompletedProcess) -> dict[int, float]:
    """Return the loss of each step that was printed, and as step -1 that of the held-out text."""
    assert run.returncode == 0, run.stderr
    found = [LINE.fullmatch(line) or HELD_OUT.fullmatch(line) for line in run.stdout.splitlines()]
    assert all(found), run.stdout
    return {-1 if match.re is HELD_OUT else int(match[1]): float(match[2]) for match in found}


def checkpoints(folder) -> list[str]:
    return sorted(file.parent.name for file in folder.glob("*/.metadata"))


def test_the_losses_are_those_of_one_process_on_any_number_of_ranks(tmp_path):
    """Each step has the same 16 sequences in all runs: only rounding differs."""
    four_steps = *SMALL, "--steps", 4, "--log-every", 1
    alone = train("train.py", *four_steps, "--peak-tflops", 0.05)
    assert alone.stdout.count("MFU") == 4
    one = losses(alone)
    assert sorted(one) == [-1, 1, 2, 3, 4]
    assert one[4] < one[1] - 0.1
    two = losses(train("train.py", *four_steps, ranks=2))
    saved = "--checkpoint", tmp_path
    half = *SMALL, "--steps", 2, "--decay", 4, "--log-every", 1, *saved
    four = losses(train("train.py", *half, ranks=4))
    rest = losses(train("train.py", *four_steps, "--accumulate", 2, *saved, ranks=2))
    assert sorted(rest) == [-1, 3, 4]  # resumed on another number of ranks
    assert two == pytest.approx(one, abs=2e-3)
    assert four | rest == pytest.approx(one, abs=2e-3)


def test_six_steps_and_six_more_print_the_loss_of_twelve(tmp_path):
    """With dropout, so that the state of each rank's random numbers counts too."""
    options = *SMALL, "--dropout", 0.2, "--log-every", 3, "--save-every", 2
    whole = train("train.py", *options, "--steps", 12, "--checkpoint", tmp_path / "1", ranks=2)
    halves = *options, "--checkpoint", tmp_path / "2"
    first = losses(train("train.py", *halves, "--steps", 6, "--decay", 12, ranks=2))
    assert checkpoints(tmp_path / "2") == ["step-00000006"]  # only the newest is kept
    second = losses(train("train.py", *halves, "--steps", 12, ranks=2))
    assert (sorted(first), sorted(second)) == ([-1, 3, 6], [-1, 9, 12])
    assert first | second == losses(whole)
    assert checkpoints(tmp_path / "1") == checkpoints(tmp_path / "2") == ["step-00000012"]


@pytest.mark.parametrize(
    ("ranks", "number"), [(0, signal.SIGTERM), (2, signal.SIGUSR1)], ids=["alone", "one of two"]
)
def test_a_signal_saves_and_ends_all_ranks(ranks, number, tmp_path):
    options = *SMALL, "--steps", 10**6, "--log-every", 1, "--checkpoint", tmp_path
    process = started("train.py", *options, ranks=ranks)
    try:
        process.stdout.readline()  # the first step is done
        of_ranks = psutil.Process(process.pid).children() if ranks else [process]
        of_ranks[-1].send_signal(number)
        *_, last = process.communicate(timeout=LIMIT)[0].splitlines()
    finally:
        (process.terminate if ranks else process.kill)()  # torchrun then ends its ranks
    step = int(re.fullmatch(r"stopped by a signal after step (\d+)", last)[1])
    assert process.returncode == 0
    assert checkpoints(tmp_path) == [f"step-{step:08}"]


def test_a_batch_that_cannot_be_split_is_refused_with_its_size():
    run = train("train.py", "--accumulate", 3)
    assert run.returncode == 1
    wanted = "--batch-size must be a multiple of 1 ranks * 3 micro-batches, got 32"
    assert run.stderr.splitlines()[-1].endswith(f"ValueError: {wanted}")


def test_each_block_of_a_text_comes_once_an_epoch_in_another_order():
    program = runpy.run_path(str(SCRIPTS / "train.py"), run_name="train")
    torch = program["torch"]
    text = program["Text"](torch.arange(41, dtype=torch.uint8), 4)
    first, second = ([text.block(place)[0].item() for place in range(n, n + 10)] for n in (0, 10))
    assert sorted(first) == sorted(second) == list(range(0, 40, 4))
    assert first != second
    inputs, targets = text.batch(range(10), torch.device("cpu"))
    assert torch.equal(inputs + 1, targets)
