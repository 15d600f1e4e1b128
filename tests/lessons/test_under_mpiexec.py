"""Each lesson on ranks that mpiexec started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_every_lesson import PROOFS

import ddp_kit as kit
from ddp_kit import mpi

pytestmark = pytest.mark.skipif(mpi.missing() is not None, reason=str(mpi.missing()))


def under_mpiexec(world_size, *arguments):
    command = [*mpi.mpiexec(world_size), sys.executable, *arguments]
    variables = os.environ | mpi.environment()
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables)


def test_every_lesson_gives_the_same_line_and_its_trace(tmp_path):
    """All in one start, because a start takes seconds."""
    program = (
        "import pathlib, sys\n"
        "from importlib import import_module\n"
        f"for name in {list(PROOFS)}:\n"
        "    lesson = import_module(f'ddp_kit.lessons.{name}')\n"
        "    lesson.main(['--backend', 'mpi', '--trace', str(pathlib.Path(sys.argv[1], name))])\n"
    )
    out = under_mpiexec(2, "-c", program, str(tmp_path))
    assert out.stdout == "".join(line.format("2 ranks") for line in PROOFS.values()), out.stderr
    for name in PROOFS:
        assert kit.load_trace(tmp_path / name).world_size == 2


def test_a_lesson_runs_as_the_readme_has_it():
    out = under_mpiexec(3, "-m", "ddp_kit.lessons.point_to_point", "--backend", "mpi")
    assert (out.stdout, out.returncode) == (PROOFS["point_to_point"].format("3 ranks"), 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world-size", "3"], "PoolError: mpiexec started 2 ranks, but --world-size is 3; "),
        (["--backend", "gloo"], "BackendError: mpiexec started these ranks, and they cannot "),
    ],
)
def test_what_mpiexec_cannot_give_is_refused(options, said):
    out = under_mpiexec(2, "-m", "ddp_kit.lessons.point_to_point", *options)
    assert out.returncode != 0
    assert said in out.stderr
    assert "Traceback" not in out.stderr


def test_torchruns_ranks_cannot_have_mpi():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["1", "-m", "ddp_kit.lessons.point_to_point", "--backend", "mpi"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'backend="mpi" needs ranks that mpiexec started; use backend="gloo"' in out.stderr
