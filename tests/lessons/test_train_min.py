"""The short training program: more ranks and more batches in a step are the same training."""

from __future__ import annotations

import re

import pytest
from programs import DIGITS, train


def percent(*options: object, ranks: int) -> float:
    """Train an epoch; return the percentage that it prints."""
    fixed = "--data", DIGITS, "--epochs", 1, *options
    run = train("train_min.py", *fixed, ranks=ranks)
    assert run.returncode == 0, run.stderr
    found = re.fullmatch(
        rf"epoch 1: ([\d.]+)% right \(world size {ranks}\)", run.stdout.splitlines()[0]
    )
    assert found, run.stdout
    return float(found[1])


def test_four_ranks_train_as_two_with_two_batches_each():
    four, two = percent(ranks=4), percent("--accumulate", 2, ranks=2)
    assert four > 80
    assert two == pytest.approx(four, abs=0.11)  # 0.05 is one digit of 2,000


def test_the_last_group_of_an_epoch_counts_less():
    """10,000 digits: the second step has 4,000, here as one batch, there as two of 2,000."""
    one = percent("--batch-size", 6000, ranks=1)
    assert percent("--batch-size", 2000, "--accumulate", 3, ranks=1) == pytest.approx(one, abs=0.11)
