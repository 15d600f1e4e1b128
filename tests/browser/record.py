"""Record the README's moving picture in a real JupyterLab: `make recording`.

A cell runs on four ranks, the next one deadlocks, and the kit explains it. The page is
photographed while the cells run; each picture is shown as long as it was on the page.
"""

from __future__ import annotations

import io
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import lab
from PIL import Image
from processes import BOUND, wait_until, wait_until_calm

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "deadlock.gif"
IMPORTS = "import torch\nimport torch.distributed as dist\n\nimport ddp_kit as kit"
RIGHT = """def worker(rank, world_size):
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    print(f"my tensor now holds {tensor.item()}")

kit.run(worker, world_size=4);"""
STUCK = """def ring(rank, world_size):
    tensor = torch.zeros(1)
    dist.recv(tensor, src=(rank - 1) % world_size)
    dist.send(tensor, dst=(rank + 1) % world_size)

kit.run(ring, world_size=4);"""
SIZE = {"width": 900, "height": 690}
COLORS = 96
EVERY = 0.1  # seconds between two photographs
READ, READ_ERROR = 3.0, 8.0  # seconds for reading what a cell shows
SCROLL, MOST = 40, 50  # pixels from one photograph to the next, and how many of these
NO_QUESTIONS = ".Toastify { display: none }"  # JupyterLab asks whether to show its news


class Film:
    """Photographs of a page, each with the second at which it was taken."""

    def __init__(self, page) -> None:
        self._page, self._panel = page, page.locator(".jp-NotebookPanel").bounding_box()
        self.frames: list[tuple[float, bytes]] = []

    def shoot(self, seconds: float) -> None:
        """Photograph the page for so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._photograph()

    def shoot_until(self, shown) -> None:
        """Photograph the page until it has this output."""
        end = time.monotonic() + lab.LIMIT
        while not shown.count():
            assert time.monotonic() < end, f"{shown} is not there after {lab.LIMIT} s"
            self._photograph()

    def _photograph(self) -> None:
        self.frames.append((time.monotonic(), self._page.screenshot(clip=self._panel)))
        self._page.wait_for_timeout(1000 * EVERY)

    def scroll_to(self, shown) -> None:
        """Scroll down until the end of an output is on the page."""
        middle = self._panel["x"] + self._panel["width"] / 2
        self._page.mouse.move(middle, self._panel["y"] + self._panel["height"] / 2)
        end = self._panel["y"] + self._panel["height"]
        for _ in range(MOST):
            box = shown.bounding_box()
            if box["y"] + box["height"] <= end:
                break
            self._page.mouse.wheel(0, SCROLL)
            self._photograph()

    def save(self, path: Path, last: float) -> None:
        """Write an animation; equal pictures become one. last: how long the last one stays."""
        pictures, times, before = [], [], b""
        for second, png in self.frames:
            if png != before:
                pictures.append(Image.open(io.BytesIO(png)).convert("RGB"))
                times.append(second)
            before = png
        lengths = [after - before for before, after in pairwise(times)]
        width, height = pictures[0].size
        together = Image.new("RGB", (width, height * len(pictures)))
        for number, picture in enumerate(pictures):
            together.paste(picture, (0, height * number))
        palette = together.quantize(COLORS)
        first, *others = (one.quantize(palette=palette, dither=0) for one in pictures)
        path.parent.mkdir(exist_ok=True)
        first.save(
            path,
            save_all=True,
            append_images=others,
            duration=[round(1000 * length) for length in [*lengths, last]],
            loop=0,
            optimize=True,
        )


def prepare(document: lab.Document) -> None:
    """Run the imports, wait for the warm ranks, and leave only the notebook on the page."""
    document.page.add_style_tag(content=NO_QUESTIONS)
    document.command("application:toggle-left-area")
    document.run()
    document.wait_for_number(cell=1)
    wait_until(lambda: len(document.server.processes()) >= 5, BOUND, "the kernel and four ranks")
    wait_until_calm(document.server.processes())


def film(document: lab.Document) -> Film:
    """Return the film of the two cells that follow the imports."""
    film = Film(document.page)
    film.shoot(1.5)
    document.command("notebook:run-cell-and-select-next")
    film.shoot_until(output(document, 2, "[rank 3] my tensor"))
    film.shoot(READ)
    document.command("notebook:run-cell")  # it adds no empty cell, as the other command would
    film.shoot_until(output(document, 3, "DeadlockError"))
    film.shoot(0.5)
    film.scroll_to(document.cell(3).locator(".jp-OutputArea-output img"))
    film.shoot(READ)
    film.scroll_to(document.cell(3).locator(".jp-OutputArea-output").last)
    return film


def output(document: lab.Document, cell: int, text: str):
    """Return the output of this cell that shows this text, which may not be there yet."""
    return document.cell(cell).locator(".jp-OutputArea-output", has_text=text)


def main() -> None:
    """Record the picture, and say how large it is."""
    lab.ENVIRONMENT.pop("DDP_KIT_WARM")
    with tempfile.TemporaryDirectory() as folder, lab.chromium() as browser:
        server = lab.Server(Path(folder))
        try:
            page = browser.new_page()
            page.set_viewport_size(SIZE)
            document = lab.Document(page, server, lab.notebook(IMPORTS, RIGHT, STUCK), "deadlock")
            prepare(document)
            recorded = film(document)
            document.close()
        finally:
            server.end()
    recorded.save(PICTURE, READ_ERROR)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
