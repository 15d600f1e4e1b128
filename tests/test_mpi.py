"""The backend "mpi4py", on ranks that mpiexec starts."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import group_cases
import psutil
import pytest

from ddp_kit.backends import mpi
from ddp_kit.errors import BackendError

ROOT = Path(__file__).resolve().parents[1]
WORLD_SIZES = (1, 3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4)))
LIMIT = 240.0  # seconds for all cases of a world size; far more than they need

needs_mpi = pytest.mark.skipif(mpi.missing() is not None, reason=str(mpi.missing()))


def launch(
    scenario: str, world_size: int, folder: Path, seconds: float = 120.0
) -> subprocess.CompletedProcess:
    """Run a scenario of `group_program.py` on ranks; fail if it does not end."""
    program = [sys.executable, "-m", "tests.group_program", scenario, str(folder)]
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            [*mpi.mpiexec(world_size), *program],
            cwd=ROOT,
            env=os.environ | mpi.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()
            process.wait()
            code = None
        output.seek(0)
        text = output.read()
    assert code is not None, f"{scenario} did not end within {seconds} s:\n{text}"
    return subprocess.CompletedProcess(program, code, text)


@functools.cache
def failures(world_size: int) -> dict[str, str]:
    """Run all cases once at a world size; return what failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = launch("cases", world_size, folder, LIMIT)
        written = folder / "failures.json"
        assert written.exists(), f"the ranks failed:\n{ended.stdout}"
        assert ended.returncode == 0, ended.stdout
        return json.loads(written.read_text())


@needs_mpi
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [*group_cases.COMPARED, *group_cases.OWN])
def test_mpi_does_what_gloo_and_its_docstring_say(case, world_size):
    problem = failures(world_size)[case]
    assert not problem, problem


@needs_mpi
@pytest.mark.parametrize("scenario", ["raising", "vanishing", "exiting"])
def test_ranks_end_with_one_that_ended(scenario, tmp_path):
    ended = launch(scenario, 2, tmp_path)
    assert ended.returncode != 0
    if scenario == "raising":
        assert "rank 1 has had enough" in ended.stdout


@needs_mpi
def test_a_rank_may_end_early(tmp_path):
    ended = launch("early", 2, tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert (tmp_path / "done").exists()


@functools.cache
def finished(scenarios: str) -> tuple[int, str, list[str]]:
    """Run scenarios in one start of three ranks; return its end, and the files that say "done"."""
    with tempfile.TemporaryDirectory() as name:
        ended = launch(scenarios, 3, Path(name))
        return ended.returncode, ended.stdout, [path.name for path in Path(name).glob("done-*")]


@needs_mpi
@pytest.mark.parametrize("scenario", ["beside", "wrong", "again", "untidy", "fewer"])
def test_ranks_finish(scenario):
    # The first imports mpi4py before the kit does, and the fourth leaves operations in flight.
    code, output, done = finished(scenario if scenario == "fewer" else "beside,wrong,again,untidy")
    assert code == 0, output
    assert [name for name in sorted(done) if scenario in name] == [
        f"done-{scenario}-{rank}" for rank in range(3)
    ], output


@needs_mpi
def test_registering_loads_no_mpi():
    program = (
        "import sys; from ddp_kit.backends import mpi; mpi.register(); mpi.register(); "
        "assert 'mpi4py' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=600)


def test_a_missing_mpi4py_is_reported(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mpi4py" else find(name)
    )
    message = 'backend="mpi" needs mpi4py, which is not installed; pip install "ddp_kit[mpi]"'
    assert mpi.missing() == message
    with pytest.raises(BackendError) as caught:
        mpi.register()
    assert str(caught.value) == message


def test_a_missing_mpiexec_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi, "_missing_package", lambda: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs the command mpiexec" in mpi.missing()
    with pytest.raises(BackendError, match="needs the command mpiexec"):
        mpi.mpiexec(2)


@needs_mpi
def test_the_mpiexec_beside_python_is_chosen(monkeypatch, tmp_path):
    beside = tmp_path / "mpiexec"
    beside.touch()
    beside.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert mpi.mpiexec(3) == [str(beside), "-n", "3"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            (5, 8, 1, 4),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2)),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (3, 4, 1, 2),
        ),
    ],
)
def test_a_rank_reads_what_its_launcher_has_set(given, expected, monkeypatch):
    leave_mpiexec(monkeypatch)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert mpi.started_by_mpiexec()
    assert mpi.rank_info() == expected


def test_a_process_without_a_launcher_is_no_rank(monkeypatch):
    leave_mpiexec(monkeypatch)
    assert not mpi.started_by_mpiexec()
    with pytest.raises(BackendError, match="start the ranks with mpiexec"):
        mpi.rank_info()


def leave_mpiexec(monkeypatch) -> None:
    for name in [name for names in mpi._VARIABLES for name in names]:
        monkeypatch.delenv(name, raising=False)
