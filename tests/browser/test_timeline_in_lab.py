"""The interactive timeline under a real pointer and keyboard, in JupyterLab and on a bare page."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import lab
import pytest

sys.path.append(str(Path(__file__).parents[1]))

import traces

from ddp_kit.notebook.timeline import TimelineWidget, pack

# As in timeline_drawing.js: pixels around the lanes, and of a lane if there are few.
LEFT, TOP, RIGHT, LANE = 66, 24, 10, 46
RUN = """\
import time, torch, torch.distributed as dist
import ddp_kit as kit

def worker(rank, world_size):
    dist.barrier()
    if rank == 2:
        time.sleep(5)
    dist.all_reduce(torch.ones(1024))

result = kit.run(worker, world_size=4)
zero = min(begin for begin, _ in result.trace.spans)
waits = [(e.waited - zero, e.end - zero) for e in result.trace if e.op == "all_reduce"]
print("waits", waits)
kit.plot.timeline(result).interact()
"""
# Plays the part of a front end: a module from a text, a model, an element.
BARE = """async ([source, css, state, rows]) => {
    document.head.appendChild(document.createElement('style')).textContent = css;
    const url = URL.createObjectURL(new Blob([source], { type: 'text/javascript' }));
    const bytes = Uint8Array.from(atob(rows), c => c.charCodeAt(0));
    const model = { get: name => name === 'rows' ? new DataView(bytes.buffer) : state[name] };
    const module = await import(url);
    window.cleanup = module.default.render({ model, el: document.querySelector('main') });
}"""


class Timeline:
    """A timeline on a page, and what a learner does with it."""

    def __init__(self, page) -> None:
        self.page = page
        self.root = page.locator(".ddp-kit-timeline")
        page.wait_for_selector(".ddp-kit-timeline[data-view]")

    @property
    def view(self) -> tuple[float, float]:
        """What is visible, in nanoseconds; a frame draws it."""
        self.page.evaluate("() => new Promise(requestAnimationFrame)")
        self.page.evaluate("() => new Promise(requestAnimationFrame)")
        begin, end = self.root.get_attribute("data-view").split()
        return float(begin), float(end)

    def place(self, rank: int, moment: float) -> tuple[float, float]:
        """Return where a moment of a rank is on the page."""
        (begin, end), box = self.view, self.root.locator("canvas").bounding_box()
        share = (moment - begin) / (end - begin)
        x = box["x"] + LEFT + share * (box["width"] - LEFT - RIGHT)
        return x, box["y"] + TOP + (rank + 0.5) * LANE

    def hover(self, rank: int, moment: float) -> str:
        self.page.mouse.move(*self.place(rank, moment))
        return self.root.locator(".tip").inner_text()

    def click(self, rank: int, moment: float) -> None:
        self.page.mouse.click(*self.place(rank, moment))

    @property
    def marked(self) -> tuple[str | None, str | None]:
        """The ranks on which something is marked, and which of them came last."""
        return self.root.get_attribute("data-marked"), self.root.get_attribute("data-late")

    @property
    def note(self) -> str:
        return self.root.locator(".note").inner_text()


def test_a_learner_zooms_hovers_and_marks_a_collective(open_notebook, server):
    document = open_notebook(lab.notebook(RUN))
    document.run()
    waits = json.loads(document.wait_for("waits", 1).split("waits")[1].translate({40: 91, 41: 93}))
    timeline = Timeline(document.page)
    timeline.root.scroll_into_view_if_needed()
    middle = sum(waits[0]) / 2
    tip = timeline.hover(0, middle)
    for text in (
        "all_reduce on rank 0",
        "Cell In[1], line 8, in worker",
        "dist.all_reduce(torch.ones(1024))",
        "4,096 bytes, float32 [1024], SUM",
        "with ranks 1, 2 and 3",
        "waited",
    ):
        assert text in tip

    timeline.click(0, middle)
    assert timeline.marked == ("0 1 2 3", "2")
    assert timeline.note.startswith("all_reduce on ranks 0 to 3: rank 2 called it last, ")

    before, under = timeline.view, timeline.place(0, middle)
    document.page.mouse.move(*under)
    document.page.mouse.wheel(0, -200)
    after = timeline.view
    assert after[1] - after[0] < 0.6 * (before[1] - before[0])
    assert timeline.place(0, middle) == pytest.approx(under, abs=1)

    document.page.mouse.down()
    document.page.mouse.move(under[0] - 40, under[1])
    document.page.mouse.move(under[0] - 80, under[1])
    document.page.mouse.up()
    assert timeline.place(0, middle) == pytest.approx((under[0] - 80, under[1]), abs=1)
    assert timeline.marked == ("0 1 2 3", "2")  # a drag is no click
    assert document.dead_widgets() == []
    kept = document.saved()["cells"][0]["outputs"][-1]["data"]
    assert {"image/png", "text/plain"} < set(kept)

    server.end_kernels()
    zoomed = timeline.view
    timeline.root.get_by_role("button", name="zoom out").click()
    assert timeline.view[1] - timeline.view[0] > 1.2 * (zoomed[1] - zoomed[0])
    assert "all_reduce on rank 3" in timeline.hover(3, sum(waits[3]) / 2)


@pytest.fixture
def open_page(chromium):
    """Open a page without JupyterLab that shows a trace."""
    pages = []

    def open_page(trace, style: str = "") -> Timeline:
        page = chromium.new_page()
        pages.append(page)
        page.set_default_timeout(1000 * lab.LIMIT)
        page.set_content(f"<body style='margin: 0; {style}'><main></main></body>")
        state = pack(trace, {})
        rows = base64.b64encode(state.pop("rows")).decode()
        page.evaluate(BARE, [TimelineWidget._esm, TimelineWidget._css, state, rows])
        return Timeline(page)

    yield open_page
    for page in pages:
        page.close()


def test_keys_do_what_the_pointer_does(open_page):
    timeline = open_page(traces.pipeline(3))
    press = timeline.page.keyboard.press
    timeline.root.locator("canvas").focus()
    press("Shift+ArrowRight")
    assert timeline.marked == ("0 1", "0")
    assert timeline.note.startswith("Message from rank 0 to rank 1: ")
    press("Shift+ArrowDown")
    assert timeline.note.startswith("Message from rank 0 to rank 1: ")
    press("Shift+ArrowRight")
    assert timeline.marked == ("1 2", "1")
    whole = timeline.view
    press("+")
    near = timeline.view
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    press("ArrowRight")
    assert timeline.view[0] - near[0] == pytest.approx(0.2 * (near[1] - near[0]))
    press("Home")
    assert timeline.view == whole
    press("Escape")
    assert timeline.marked == ("", "")


def test_what_never_came_is_named(open_page):
    timeline = open_page(traces.broken(3))
    assert "never sent" in timeline.hover(0, 1.6e6)
    timeline.click(2, 2e6)
    assert timeline.marked[0] == "1 2"
    assert "Rank 0 did not call it." in timeline.note
    timeline.click(1, 1.1e6)
    assert timeline.note == "send(dst=0) on rank 1: it was never received."


def test_events_that_are_too_close_are_counted_and_a_click_parts_them(open_page):
    timeline = open_page(traces.mixed(2, 2000))
    whole = timeline.view
    tip = timeline.hover(1, sum(whole) / 2)
    assert "events on rank 1" in tip
    assert "\N{MULTIPLICATION SIGN} all_reduce" in tip
    timeline.click(1, sum(whole) / 2)
    assert timeline.view[1] - timeline.view[0] < 0.05 * (whole[1] - whole[0])


def test_a_timeline_wears_the_colours_of_a_dark_and_narrow_page_of_vs_code(open_page):
    # Its Jupyter extension sets --jp- colours, too, but in high contrast leaves one of them white.
    colors = "--vscode-editor-background: #1e1e1e; --vscode-editor-foreground: #d4d4d4"
    timeline = open_page(traces.pipeline(3), f"width: 320px; {colors}; --jp-layout-color0: white")
    style = timeline.root.evaluate(
        "e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).color, e.scrollWidth]"
    )
    assert style == ["rgb(30, 30, 30)", "rgb(212, 212, 212)", 320]
    pixel = """e => [...e.getContext('2d').getImageData(70 * devicePixelRatio, 47, 1, 1).data]"""
    assert timeline.root.locator("canvas").evaluate(pixel) == [58, 66, 76, 255]
