"""One JupyterLab and one Chromium for a file; without Chromium its tests are skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))

import lab


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
    _, left = psutil.wait_procs(server.processes(), timeout=3)
    for process in left:
        process.kill()
    assert not left, f"left alive: {left}"


@pytest.fixture
def open_notebook(chromium, server) -> Iterator[lab.OpenNotebook]:
    """Open a notebook in a page; at the end of the test its page is closed, its kernel ended."""
    pages = []

    def open_notebook(notebook, name: str = "lesson") -> lab.Document:
        pages.append(chromium.new_page())
        return lab.Document(pages[-1], server, notebook, name)

    try:
        yield open_notebook
    finally:
        for page in pages:
            page.close()
        server.end_kernels()
