"""PyTorch's own distributed tests pass as workers of a pool, as the table says.

`make test` has every 24th of them, `make verdicts` all.
"""

from __future__ import annotations

import csv

import pytest
import torch_suite

from ddp_kit.backends import mpi, shm


@pytest.mark.parametrize("column", ["gloo", "shm", pytest.param("mpi", marks=pytest.mark.long)])
def test_the_tests_that_passed_when_the_table_was_recorded_pass(column):
    if missing := {"gloo": lambda: None, "shm": shm.missing, "mpi": mpi.missing}[column]():
        pytest.skip(missing)
    tests, ended = torch_suite.recorded()
    chosen = [n for n in tests if tests[n] == 3 and ended[column][n] == torch_suite.PASSED][::24]
    found = torch_suite.run(column, dict.fromkeys(chosen, 3), {}, lambda: None, text=True)
    assert found == dict.fromkeys(chosen, torch_suite.PASSED)


def test_a_test_that_no_longer_passes_makes_the_runner_fail(monkeypatch, tmp_path):
    table = tmp_path / "table.csv"
    with table.open("w") as file:
        rows = ["test", "ranks", *torch_suite.COLUMNS], ["test_send", 3, *["passed"] * 4]
        csv.writer(file).writerows(rows)
    monkeypatch.setattr(torch_suite, "RECORD", table)
    monkeypatch.setattr(torch_suite, "PROGRESS", tmp_path / "build" / "progress.json")
    monkeypatch.setattr("sys.argv", ["torch_suite.py", "--columns", "gloo"])
    monkeypatch.setattr(torch_suite, "run", lambda *_: {"test_send": "DeadlockError"})
    with pytest.raises(SystemExit, match="gloo: test_send passed, and now: DeadlockError"):
        torch_suite.main()
