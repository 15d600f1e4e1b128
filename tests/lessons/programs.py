"""Run the training programs that learners take home, as a learner's shell would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kernels import QUICK_START, learners_shell

import ddp_kit as kit

SCRIPTS = Path(__file__).resolve().parents[2] / "notebooks" / "scripts"
DIGITS = Path(kit.__file__).parent / "lessons" / "data" / "digits"
LIMIT = 300  # seconds for one run
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def started(program: str, *options: object, ranks: int = 0) -> subprocess.Popen:
    """Start a program as python does, or on some ranks of torchrun, on one thread a rank."""
    launcher = [*TORCHRUN, str(ranks)] if ranks else []
    return subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPTS / program), *map(str, options)],
        env=learners_shell(**QUICK_START, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(program: str, *options: object, ranks: int = 0) -> subprocess.CompletedProcess:
    """Run a program to its end."""
    process = started(program, *options, ranks=ranks)
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.terminate()  # torchrun then ends its ranks
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
