"""Runs in the page: their controls and their live view, the stop button and a restart."""

from __future__ import annotations

import lab
from processes import assert_gone

from ddp_kit.notebook.live import STALE
from ddp_kit.settings import LIVE_VIEW_OLD_AFTER

BOUND = 60.0  # seconds; it takes less than 1 where nothing else runs

COLLECTIVES = """
from ddp_kit.lessons import collectives
collectives.explore(world_size=2).interact()
"""
RING = """
from ddp_kit.lessons import ring_allreduce
ring_allreduce.explore(world_size=2).interact()
"""
SHOWN = """
from ddp_kit.lessons import collectives
collectives.explore(world_size=2)
"""
NEW_PICTURE = """([cell, before]) => {
    const shown = document.querySelectorAll('.jp-CodeCell')[cell - 1];
    const image = shown.querySelector('.jp-OutputArea img.widget-image');
    return image?.naturalWidth > 100 && image.src !== before && image.src;
}"""
COUNTS = """
import os, time, torch, torch.distributed as dist
import ddp_kit as kit

def counts(rank, world_size):
    step = 0
    while rank == 1 and not os.path.exists("enough"):
        step += 1
        print(f"step {step}")
        time.sleep(0.1)
    if rank == 1:
        dist.send(torch.ones(1), dst=0)
    else:
        dist.recv(torch.zeros(1), src=1)

kit.run(counts, world_size=2);
"""

NEWER = """step => {
    const shown = document.querySelector('.jp-CodeCell .jp-OutputArea')?.textContent ?? '';
    const steps = [...shown.matchAll(/step (\\d+)/g)].map(found => Number(found[1]));
    return Math.max(0, ...steps) > step && Math.max(...steps);
}"""
# These are non-breaking spaces.
WAITS_LONGER = """seconds => {
    const shown = document.querySelector('.jp-CodeCell .jp-OutputArea tr')?.textContent ?? '';
    const found = shown.match(/rank\\s0waiting\\sin\\srecv\\(src=1\\)\\s([\\d.]+)\\ss/);
    return found && Number(found[1]) > seconds && Number(found[1]);
}"""


def test_explorers_are_live_at_once_redraw_and_play(open_notebook):
    """All in one page, because a kernel and its ranks take seconds."""
    document = open_notebook(lab.notebook(SHOWN, COLLECTIVES, RING))
    is_live_at_once(document, cell=1)
    runs_again_and_redraws(document, cell=2)
    plays_the_steps_of_a_ring(document, cell=3)
    assert document.dead_widgets() == []


def is_live_at_once(document, cell):
    document.run()
    menu = document.cell(cell).locator(".widget-dropdown select").first
    menu.wait_for()
    document.wait_until_it_shows(pictures=1, outputs=2, tables=0)
    picture = document.cell(cell).locator("img.widget-image")
    assert not picture.is_visible()  # the picture is above
    menu.select_option("broadcast")
    document.wait_for("kit.run(collectives.broadcast, 0, world_size=2)", cell)
    document.wait(NEW_PICTURE, arg=[cell, ""])
    picture.wait_for()  # shown soon after it has changed
    document.wait_until_it_shows(pictures=1, outputs=2, tables=0)
    saved = [output["data"] for output in document.saved()["cells"][0]["outputs"]]
    still, controls = filter(None, saved)  # the live view leaves an empty one
    assert set(still) == {"image/png", "text/plain"}
    assert controls["text/plain"].startswith("Menus and sliders appear here")


def runs_again_and_redraws(document, cell):
    document.select(cell)  # the last click was into the one before
    document.run()
    first = document.wait(NEW_PICTURE, arg=[cell, ""])
    document.cell(cell).locator(".widget-dropdown select").first.select_option("broadcast")
    document.wait_for("kit.run(collectives.broadcast, 0, world_size=2)", cell)
    from_0 = document.wait(NEW_PICTURE, arg=[cell, first])
    slider = document.cell(cell).locator(".widget-slider", has_text="root")
    slider.locator(".noUi-handle").press("ArrowRight")
    document.wait_for("kit.run(collectives.broadcast, 1, world_size=2)", cell)
    document.wait(NEW_PICTURE, arg=[cell, from_0])


def plays_the_steps_of_a_ring(document, cell):
    document.select(cell)
    document.run()
    picture = document.wait(NEW_PICTURE, arg=[cell, ""])
    document.cell(cell).locator(".widget-play button").first.click()
    for _ in range(2):
        picture = document.wait(NEW_PICTURE, arg=[cell, picture])


def test_the_live_view_moves_while_a_run_lasts_and_goes_with_it(open_notebook, server):
    document = open_notebook(lab.notebook(COUNTS))
    document.run()
    step, seconds = 0, 0.0
    for _ in range(3):
        step = document.wait(NEWER, arg=step)
        seconds = document.wait(WAITS_LONGER, arg=seconds)
    (server.folder / "enough").touch()
    document.wait_for_number(1)
    document.wait_until_idle()
    outputs = document.saved()["cells"][0]["outputs"]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "[rank 1] step 1\n" in printed
    assert document.shown(1).strip() == printed.strip()


def test_a_restart_and_the_stop_button_end_stuck_ranks(open_notebook):
    document = open_notebook(lab.stuck_notebook())
    stuck = lab.get_stuck(document)
    old = document.cell(2).get_by_text(STALE)
    old.wait_for(state="attached")
    assert not old.is_visible()
    restart(document)
    assert_gone(stuck, "a restart during a run")
    old.wait_for(state="visible", timeout=1000 * (LIVE_VIEW_OLD_AFTER + BOUND))
    document.select(1)
    stuck = lab.get_stuck(document)
    document.click("notebook:interrupt-kernel")
    document.wait_for_number(2, BOUND)
    document.wait_for("KeyboardInterrupt", cell=2)
    document.wait_until_idle(BOUND)
    assert_gone(stuck, "the stop button")
    lab.assert_next_run_works(document)


def restart(document: lab.Document) -> None:
    document.click("notebook:restart-kernel")
    document.page.click(".jp-Dialog button.jp-mod-accept")
    document.page.wait_for_selector(".jp-Dialog", state="detached")
