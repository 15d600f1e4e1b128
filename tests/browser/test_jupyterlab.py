"""The first notebook in a real JupyterLab, in a real Chromium."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

FIRST = Path(__file__).parents[2] / "notebooks" / "00_start_here.ipynb"
LIMIT = 60  # seconds for one step of a browser or a server; slow machines need many
FLAGS = [
    "--no-sandbox",  # root in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
# The status bar counts: the indicator alone says idle also while no kernel is there.
IDLE = """() => window.jupyterapp
    && document.querySelector('#jp-main-statusbar')?.textContent.includes('| Idle')
    && document.querySelector(".jp-Notebook-ExecutionIndicator[data-status='idle']")
"""
# JupyterLab fills a page in pieces, so the number of the code cells is asked for too.
PROMPTS = """count => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
    return prompts.length === count && prompts.every(e => /\\[\\d+\\]/.test(e.textContent));
}"""
STUCK_RANKS = """() => {
    const found = document.querySelector('.jp-Notebook')?.textContent
        .match(/process \\d+ is stuck/g);
    return found?.length === 2 && found.map(text => Number(text.match(/\\d+/)[0]));
}"""
STUCK = """
import os, torch, torch.distributed as dist
import ddp_kit as kit

def stuck(rank, world_size):
    print("process", os.getpid(), "is stuck")
    dist.recv(torch.zeros(1), src=1 - rank)

kit.run(stuck, world_size=2)
"""
# Without it JupyterLab asks in a dialog which kernel to start, and starts none.
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
NEXT = "list(kit.run(lambda rank, world_size: rank))"


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab on the first notebook as saved, without outputs, and one that gets stuck."""
    shutil.copy(FIRST, tmp_path / "saved.ipynb")
    empty = nbformat.read(FIRST, as_version=4)
    for cell in code_cells(empty):
        cell.update(outputs=[], execution_count=None)
    nbformat.write(empty, tmp_path / "empty.ipynb")
    stuck = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(STUCK), nbformat.v4.new_code_cell(NEXT)],
        metadata={"kernelspec": KERNEL},
    )
    nbformat.write(stuck, tmp_path / "stuck.ipynb")
    log = tmp_path / "lab.log"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [
        f"--ServerApp.root_dir={tmp_path}",
        "--ServerApp.port=0",
        "--ServerApp.ip=127.0.0.1",
    ]
    command += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True"]
    command += ["--LabApp.expose_app_in_browser=True"]
    environment = os.environ | {"JUPYTER_CONFIG_DIR": str(tmp_path / "config")}  # not the user's
    with log.open("w") as stream:
        server = psutil.Popen(command, stdout=stream, stderr=stream, cwd=tmp_path, env=environment)
    try:
        deadline = time.monotonic() + LIMIT
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found.group()
    finally:
        if server.is_running():
            family = [*server.children(recursive=True), server]
            server.terminate()  # it ends its kernels first
            late = psutil.wait_procs(family, timeout=15)[1]
            for process in late:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(late, timeout=5)


@pytest.fixture
def page():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, timeout=1000 * LIMIT
        )
        try:
            page = browser.new_page(viewport={"width": 1300, "height": 1500})
            page.set_default_timeout(1000 * LIMIT)
            yield page
        finally:
            browser.close()


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def open_notebook(page, address: str) -> None:
    page.goto(f"{address}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.wait_for_function(IDLE)


def command(page, name: str) -> None:
    # Done at the first look. Unlike wait_for_function, evaluate has no limit.
    page.wait_for_function(
        "name => { window.jupyterapp.commands.execute(name); return true }", arg=name
    )


def wait_for_output(page, text: str, seconds: float = LIMIT) -> None:
    output = page.locator(".jp-OutputArea-output", has_text=text)
    output.first.wait_for(timeout=1000 * seconds)


def test_the_first_notebook_runs_from_top_to_bottom(lab, page):
    open_notebook(page, f"{lab}lab/tree/empty.ipynb")
    assert page.locator(".jp-OutputArea-output").count() == 0
    command(page, "notebook:run-all-cells")
    count = len(code_cells(nbformat.read(FIRST, as_version=4)))
    page.wait_for_function(PROMPTS, arg=count)
    page.wait_for_function(IDLE)
    wait_for_output(page, "a warm run on four ranks takes")
    red = page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_text_contents()
    assert [text.split(":")[0] for text in red] == ["RankError", "PoolError"]
    assert page.locator(".jp-RenderedImage img").count() == 1
    shown = page.locator(".jp-OutputArea-output pre").all_text_contents()
    assert any("[rank 3] I am rank 3 of 4" in text for text in shown)
    assert not any("at work" in text for text in shown)  # the live view has gone


def test_the_stop_button_frees_a_deadlock_and_leaves_no_rank(lab, page):
    open_notebook(page, f"{lab}lab/tree/stuck.ipynb")
    command(page, "notebook:run-cell-and-select-next")
    # The live view shows the prints of a run that has not ended.
    ranks = [psutil.Process(pid) for pid in page.wait_for_function(STUCK_RANKS).json_value()]
    page.click("[data-command='notebook:interrupt-kernel']")
    wait_for_output(page, "KeyboardInterrupt")
    assert psutil.wait_procs(ranks, timeout=5)[1] == []
    page.wait_for_function(IDLE)  # a request before the answer would be dropped
    command(page, "notebook:run-cell")
    wait_for_output(page, "[0, 1, 2, 3]")


def test_a_saved_notebook_shows_its_picture_before_it_runs(lab, page):
    open_notebook(page, f"{lab}lab/tree/saved.ipynb")
    page.wait_for_function(
        "() => document.querySelector('.jp-RenderedImage img')?.naturalWidth > 100"
    )
    wait_for_output(page, "a warm run on four ranks takes")
    notebook = page.locator(".jp-Notebook").text_content()
    assert "Error displaying widget" not in notebook
    assert "Loading widget" not in notebook
