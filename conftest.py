"""Which notebooks `pytest` runs, how quickly their Python starts, and what a failure prints."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

import pytest
from jupyter_client import KernelManager

# Words of a notebook whose ranks import torch._dynamo, which takes a second.
NEEDS_DYNAMO = ("DistributedDataParallel(", "DTensor", "optim.", "ADAM", "SGD")
SANITIZE = Path(__file__).parent / "tests" / "notebooks" / "sanitize.cfg"

# More processes than cores: a thread of OpenMP that waits must not spin on a core that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The processes that tests start import PyTorch without gc. Ranks of `kit.torchrun` get `sys.path`.
QUICK_IMPORTS = str(Path(__file__).parent / "tests" / "quick_imports")
if QUICK_IMPORTS not in sys.path:
    sys.path.append(QUICK_IMPORTS)
    given = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([QUICK_IMPORTS, *given])


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Run the notebooks of the course, whose names begin with a number, and not a learner's own."""
    own = collection_path.suffix == ".ipynb" and not re.match(r"\d\d?_", collection_path.name)
    return True if own else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the file that mostly waits, and leave some notebooks to `make long`.

    These are exercises, solutions and projects, unless the command line names them, because
    tests/check/test_exercise_notebooks.py and tests/projects run their answers without kernels.
    """
    # Begun last, it would go on for a minute after all others have ended.
    items.sort(key=lambda item: item.path.name != "test_deadlocks.py")
    folders = ("exercises", "solutions", "projects")
    if any(folder in argument for argument in config.args for folder in folders):
        return
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.parent.name in folders:
            item.add_marker("long")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork the ranks of notebooks; see tests/quick_imports/forked_spawn.py."""
    os.environ.pop("DDP_KIT_FORKED_SPAWN", None)
    if item.path.suffix == ".ipynb" and sys.platform == "linux":
        os.environ["DDP_KIT_FORKED_SPAWN"] = ",".join(_imported_by_ranks(item.path))


@functools.cache
def _imported_by_ranks(notebook: Path) -> list[str]:
    """Return the modules that are to be imported once, before the ranks are forked."""
    text = notebook.read_text("utf-8")
    needs_dynamo = any(word in text for word in NEEDS_DYNAMO)
    lesson = f"ddp_kit.lessons.{notebook.stem[3:]}"
    return [*(["torch._dynamo"] if needs_dynamo else []), *([lesson] if lesson in text else [])]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name each failure when it happens; compare as SANITIZE says; connect kernels by files."""
    config.option.nbval_sanitize_with = str(SANITIZE)
    if sys.platform == "linux":
        import without_ports

        without_ports.install(KernelManager)
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
