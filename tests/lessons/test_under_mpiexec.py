"""Each lesson on ranks that mpiexec started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_every_lesson import PROOFS

import ddp_kit as kit
from ddp_kit.backends import mpi
from ddp_kit.lessons import point_to_point

pytestmark = pytest.mark.skipif(mpi.missing() is not None, reason=str(mpi.missing()))


def under_mpiexec(world_size, *arguments):
    command = [*mpi.mpiexec(world_size), sys.executable, *arguments]
    variables = os.environ | mpi.environment()
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables)


@pytest.mark.long
def test_every_lesson_gives_the_same_line_and_its_trace(tmp_path):
    """All in one start, because a start takes seconds."""
    program = (
        "import pathlib, sys\n"
        "from importlib import import_module\n"
        f"for name in {list(PROOFS)}:\n"
        "    lesson = import_module(f'ddp_kit.lessons.{name}')\n"
        "    options = ['--backend', 'mpi', '--trace', str(pathlib.Path(sys.argv[1], name))]\n"
        "    lesson.main(options)\n"
    )
    out = under_mpiexec(2, "-c", program, str(tmp_path))
    assert out.stdout == "".join(line.format("2 ranks") for line in PROOFS.values()), out.stderr
    for name in PROOFS:
        assert kit.load_trace(tmp_path / name).world_size == 2


def test_a_lesson_runs_as_the_readme_says():
    out = under_mpiexec(3, "-m", "ddp_kit.lessons.point_to_point", "--backend", "mpi")
    assert (out.stdout, out.returncode) == (PROOFS["point_to_point"].format("3 ranks"), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--world-size", "3"],
            "mpiexec has started 2 ranks, but --world-size is 3; "
            "leave out --world-size, or set -n to it",
        ),
        (
            ["--backend", "gloo"],
            "mpiexec has started these ranks, and they cannot use 'gloo'; "
            "leave out --backend, or start them with torchrun",
        ),
    ],
)
def test_what_mpiexec_cannot_give_is_refused(options, message, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")  # as mpiexec -n 2 would
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(kit.KitError) as caught:
        point_to_point.main(options)
    assert str(caught.value) == message


def test_torchruns_ranks_cannot_use_mpi(monkeypatch):
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
    }
    for name, value in (variables | {"TORCHELASTIC_RUN_ID": "none"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kit.BackendError) as caught:
        point_to_point.main(["--backend", "mpi"])
    message = 'backend="mpi" needs ranks that mpiexec has started; use backend="gloo"'
    assert str(caught.value) == message
