"""Which notebooks `pytest` runs, and what it prints as soon as a test fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Run the notebooks of the course, whose names begin with a number, and not a learner's own."""
    own = collection_path.suffix == ".ipynb" and not re.match(r"\d\d_", collection_path.name)
    return True if own else None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name each failure as soon as it happens."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_NamesFailures(reporter))


class _NamesFailures:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"{report.when} of {report.nodeid} failed", red=True)
