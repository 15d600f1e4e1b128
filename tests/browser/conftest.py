"""One JupyterLab and one Chromium for a file; without Chromium its tests are skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))

import lab
from processes import BOUND


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if lab.CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with lab.chromium() as context:
        yield context


@pytest.fixture(scope="module")
def server(chromium, tmp_path_factory) -> Iterator[lab.Server]:
    own = lab.Server(tmp_path_factory.mktemp("lab"))
    try:
        yield own
    finally:
        own.end()


@pytest.fixture(autouse=True)
def no_process_survives(server):
    """Fail a test that leaves a kernel or a rank alive, and end that process.

    It overrides the fixture of all other tests, because a browser that lasts for a whole file
    starts and ends processes at any time.
    """
    yield
    _, left = psutil.wait_procs(server.processes(), timeout=BOUND)
    for process in left:
        process.kill()
    assert not left, f"left alive: {left}"


@pytest.fixture(scope="module")
def page(chromium):
    """One page for a file, because JupyterLab takes seconds to load."""
    return chromium.new_page()


@pytest.fixture
def open_notebook(page, server) -> Iterator[lab.OpenNotebook]:
    """Open a notebook; at the end of the test it is closed, its kernel ended."""
    opened = []

    def open_notebook(notebook, name: str = "lesson") -> lab.Document:
        opened.append(lab.Document(page, server, notebook, name))
        return opened[-1]

    try:
        yield open_notebook
    finally:
        for document in opened:
            document.close()
        server.end_kernels()
