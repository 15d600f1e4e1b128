"""The backend "shm", on plain processes that PyTorch connects."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import group_cases
import pytest

ROOT = Path(__file__).resolve().parents[1]
WORLD_SIZES = (1, 3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4)))
CASES = [*group_cases.COMPARED, *group_cases.OWN]
LIMIT = 240.0  # seconds for all cases of a world size; far more than they need

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has futexes")


@contextlib.contextmanager
def started(scenario: str, world_size: int, folder: Path, *more: str) -> Iterator[list]:
    """Start the ranks of a scenario of `group_program.py`; kill those that do not end."""
    program = [sys.executable, "-m", "tests.group_program", scenario, str(folder), *more]
    ranks = []
    try:
        for rank in range(world_size):
            with open(folder / f"output-{rank}", "w") as output:
                own = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
                ranks.append(
                    subprocess.Popen(
                        program,
                        cwd=ROOT,
                        env=os.environ | own,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def launch(
    scenario: str, world_size: int, folder: Path, *more: str, seconds: float = 120.0
) -> tuple[list[int], str]:
    """Run a scenario; return the exit codes and what was printed. Fail if it does not end."""
    with started(scenario, world_size, folder, *more) as ranks:
        try:
            codes = [process.wait(timeout=seconds) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = None
    text = "".join(path.read_text() for path in sorted(folder.glob("output-*")))
    assert codes is not None, f"{scenario} did not end within {seconds} s:\n{text}"
    return codes, text


@functools.cache
def failures(world_size: int) -> dict[str, str]:
    """Run all cases once at a world size; return what failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes, text = launch("cases", world_size, folder, seconds=LIMIT)
        written = folder / "failures.json"
        assert written.exists(), f"the ranks failed:\n{text}"
        assert codes == [0] * world_size, text
        return json.loads(written.read_text())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [case for case in CASES if case not in group_cases.ONLY_MPI])
def test_shm_differs_from_gloo_or_from_its_docstring(case, world_size):
    problem = failures(world_size)[case]
    assert not problem, problem
