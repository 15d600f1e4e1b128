"""JupyterLab in Chromium: one server and one browser for all tests of a file.

Server      a JupyterLab on an empty folder, with settings of its own
Document    a notebook open in a page of the browser, and what a learner does with it
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
from kernels import ENVIRONMENT
from processes import alive
from regenerate import METADATA

LIMIT = 400  # seconds for one step of a browser or a server; slow machines need many
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
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
# JupyterLab fills a page in pieces, so the number of the code cells is asked for too. An error that
# ends Run All leaves cells without a number, and the kernel idle.
ENDED = """count => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
    const errors = document.querySelectorAll("[data-mime-type='application/vnd.jupyter.stderr']");
    if (prompts.length === count && prompts.every(e => /\\[\\d+\\]/.test(e.textContent)))
        return 'numbered';
    if (!errors.length || !(IDLE)()) window.idleSince = undefined;
    else if (Date.now() - (window.idleSince ??= Date.now()) > 60000)
        return errors[errors.length - 1].textContent;
}""".replace("IDLE", IDLE)
NUMBERED = """index => /\\[\\d+\\]/.test(
    document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[index].textContent)
"""
# A page is filled in pieces here too.
SHOWS = """([pictures, outputs, tables]) => {
    const all = selector => [...document.querySelectorAll(`.jp-Notebook ${selector}`)];
    const images = all('.jp-RenderedImage img');
    return images.length === pictures && images.every(e => e.naturalWidth > 100)
        && all('.jp-OutputArea-output').length === outputs
        && all('.jp-RenderedMarkdown table').length === tables;
}"""
DEAD = ("Error displaying widget", "Loading widget")


class Server:
    """A JupyterLab of the tests' own. It neither reads nor writes the learner's settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "notebooks"
        self.folder.mkdir()
        own = {f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
        command += [f"--ServerApp.root_dir={self.folder}", "--ServerApp.port=0"]
        command += ["--ServerApp.ip=127.0.0.1", "--IdentityProvider.token="]
        command += ["--ServerApp.disable_check_xsrf=True", "--LabApp.expose_app_in_browser=True"]
        # Else it asks a server on the internet whether there is a newer JupyterLab.
        command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
        # The PATH is that of `make lab`.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        log = folder / "lab.log"
        with log.open("w") as stream:
            self._process = psutil.Popen(
                command,
                stdout=stream,
                stderr=stream,
                cwd=folder,
                env=ENVIRONMENT | own | {"PATH": path},
            )
        try:
            deadline = time.monotonic() + LIMIT
            while not (found := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())):
                assert self._process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            self.address = found.group()
        except BaseException:
            self.end()
            raise

    def _call(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(self.address + path, method=method)
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return json.loads(answer.read() or "null")

    def processes(self) -> list[psutil.Process]:
        """Return the running kernels and their ranks."""
        return [child for child in self._process.children(recursive=True) if alive(child)]

    def end_kernels(self) -> None:
        for session in self._call("api/sessions"):
            self._call(f"api/sessions/{session['id']}", "DELETE")
        psutil.wait_procs(self.processes(), timeout=15)

    def end(self) -> None:
        if self._process.is_running():
            family = [*self._process.children(recursive=True), self._process]
            self._process.terminate()  # it ends its kernels first
            late = psutil.wait_procs(family, timeout=15)[1]
            for process in late:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(late, timeout=5)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Return a browser that is cut off from the internet; its pages share one cache."""
    from playwright import sync_api  # the tests are skipped where it is not installed

    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, timeout=1000 * LIMIT
        )
        try:
            yield browser.new_context(viewport={"width": 1300, "height": 1500})
        finally:
            browser.close()


class Document:
    """A notebook open in a page of JupyterLab, its kernel ready."""

    def __init__(self, page, server: Server, notebook, name: str) -> None:
        nbformat.write(notebook, server.folder / f"{name}.ipynb")
        self.page = page
        self.server = server
        self.count = sum(cell.cell_type == "code" for cell in notebook.cells)
        page.set_default_timeout(1000 * LIMIT)
        if page.url.startswith(server.address):
            self.command("docmanager:open", path=f"{name}.ipynb")
        else:
            page.goto(f"{server.address}lab/tree/{name}.ipynb?reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        self.wait_until_idle()

    def wait(self, condition: str, seconds: float = LIMIT, **arguments) -> Any:
        """Wait until a function of JavaScript returns something true; return that."""
        # Poll ten times a second; the default is every frame, which costs half a core.
        return self.page.wait_for_function(
            condition, timeout=1000 * seconds, polling=100, **arguments
        ).json_value()

    def wait_until_idle(self, seconds: float = LIMIT) -> None:
        self.wait(IDLE, seconds)

    def command(self, name: str, **arguments: str) -> None:
        # This is true at the first poll. Unlike wait_for_function, evaluate has no time limit.
        call = "given => { window.jupyterapp.commands.execute(...given); return true }"
        self.wait(call, arg=[name, arguments])

    def close(self) -> None:
        """Close the notebook and leave JupyterLab open for another one."""
        # As opposed to a command, this does not ask whether to save.
        self.wait("() => { window.jupyterapp.shell.currentWidget.dispose(); return true }")
        self.page.wait_for_selector(".jp-Notebook", state="detached")

    def run(self) -> None:
        """Run the selected cell and select the next."""
        self.wait_until_idle()  # a request before the kernel's answer would be dropped
        self.command("notebook:run-cell-and-select-next")

    def run_all(self, seconds: float) -> None:
        """Run all cells, and wait until each has its number; fail if an error ends it earlier."""
        self.command("notebook:run-all-cells")
        ended = self.wait(ENDED, seconds, arg=self.count)
        assert ended == "numbered", ended
        self.wait_until_idle()

    def click(self, command: str) -> None:
        """Press a button of the notebook's toolbar."""
        self.page.click(f".jp-NotebookPanel-toolbar [data-command='{command}']")

    def cell(self, number: int):
        """Return the code cell with this number, from 1."""
        return self.page.locator(".jp-CodeCell").nth(number - 1)

    def wait_for(self, text: str | re.Pattern, cell: int, seconds: float = LIMIT) -> str:
        """Wait until an output of a cell shows a text; return all that this output shows."""
        output = self.cell(cell).locator(".jp-OutputArea-output", has_text=text).first
        output.wait_for(timeout=1000 * seconds)
        return output.text_content()

    def wait_for_number(self, cell: int, seconds: float = LIMIT) -> None:
        """Wait until a cell has its number: the prompt is back."""
        self.wait(NUMBERED, seconds, arg=cell - 1)

    def select(self, cell: int) -> None:
        """Select a code cell."""
        self.cell(cell).locator(".jp-InputPrompt").click()

    def wait_until_it_shows(self, pictures: int, outputs: int, tables: int) -> None:
        """Wait until there are this many of each; broken pictures do not count."""
        self.wait(SHOWS, arg=[pictures, outputs, tables])

    def shown(self, cell: int) -> str:
        """Return all that a cell shows below its code."""
        return "\n".join(self.cell(cell).locator(".jp-OutputArea-output").all_text_contents())

    def saved(self) -> dict:
        """Return the notebook as JupyterLab would save it now."""
        return self.wait("() => window.jupyterapp.shell.currentWidget.model.toJSON()")

    def dead_widgets(self) -> list[str]:
        shown = self.page.locator(".jp-Notebook").text_content()
        return [text for text in DEAD if text in shown]


OpenNotebook = Callable[..., Document]


def notebook(*sources: str):
    """Return a notebook of code cells that have not run."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    # Without a kernel's name JupyterLab asks in a dialog which kernel to start, and starts none.
    return nbformat.v4.new_notebook(cells=cells, metadata=METADATA)


# Cells of a run that cannot end and is no deadlock: rank 0 might send at any moment. They name
# the processes first, because a run that is interrupted shows no result.
WARM = """
import os, time, torch, torch.distributed as dist
import ddp_kit as kit

print("processes", *kit.run(lambda rank, world_size: os.getpid(), world_size=2))
"""
STUCK = """
def stuck(rank, world_size):
    print(f"rank {rank} has begun")
    if rank == 0:
        time.sleep(600)
    dist.recv(torch.zeros(1), src=0)

kit.run(stuck, world_size=2)
"""
AGAIN = "list(kit.run(lambda rank, world_size: rank + 41, world_size=2))"


def stuck_notebook():
    return notebook(WARM, STUCK, AGAIN)


def warm_ranks(document: Document) -> list[psutil.Process]:
    """Run the first cell of the stuck notebook; return the processes of its ranks.

    A test may kill these processes, so a number on the page is not enough: it must be the id of
    a descendant of the test's own JupyterLab.
    """
    document.run()
    printed = document.wait_for(re.compile(r"^processes \d+ \d+\s*$"), cell=1)
    pids = {int(pid) for pid in printed.split()[1:]}
    ranks = [child for child in document.server.processes() if child.pid in pids]
    assert len(ranks) == 2, f"{printed}: not two processes of this server"
    return ranks


def get_stuck(document: Document) -> list[psutil.Process]:
    """Run the first two cells; return the ranks when both are stuck in what is no deadlock."""
    ranks = warm_ranks(document)
    document.run()
    for rank in (0, 1):
        document.wait_for(f"rank {rank} has begun", cell=2)
    return ranks


def assert_next_run_works(document: Document) -> None:
    document.wait_until_idle()
    document.run()
    document.wait_for("[41, 42]", cell=3)
