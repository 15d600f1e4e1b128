"""The controls of a picture, moved by hand in the page."""

from __future__ import annotations

import lab

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
NEW_PICTURE = """before => {
    const image = document.querySelector('.jp-OutputArea img.widget-image');
    return image?.naturalWidth > 100 && image.src !== before && image.src;
}"""


def test_a_menu_and_a_slider_run_again_and_redraw(open_notebook):
    document = open_notebook(lab.notebook(COLLECTIVES))
    document.run()
    first = document.wait(NEW_PICTURE, arg="")
    document.page.locator(".widget-dropdown select").first.select_option("broadcast")
    document.wait_for("kit.run(collectives.broadcast, 0, world_size=2)", cell=1)
    from_0 = document.wait(NEW_PICTURE, arg=first)
    root = document.page.locator(".widget-slider", has_text="root").locator(".noUi-handle")
    root.press("ArrowRight")
    document.wait_for("kit.run(collectives.broadcast, 1, world_size=2)", cell=1)
    document.wait(NEW_PICTURE, arg=from_0)
    assert document.dead_widgets() == []


def test_play_goes_through_the_steps_of_a_ring(open_notebook):
    document = open_notebook(lab.notebook(RING))
    document.run()
    picture = document.wait(NEW_PICTURE, arg="")
    document.page.locator(".widget-play button").first.click()
    for _ in range(2):
        picture = document.wait(NEW_PICTURE, arg=picture)
    assert document.dead_widgets() == []


def test_an_explorer_at_the_end_of_a_cell_is_live_at_once(open_notebook):
    document = open_notebook(lab.notebook(SHOWN))
    document.run()
    menu = document.page.locator(".widget-dropdown select").first
    menu.wait_for()
    document.wait_until_it_shows(pictures=1, outputs=2, tables=0)
    assert not document.page.locator("img.widget-image").is_visible()  # the picture is above
    menu.select_option("broadcast")
    document.wait_for("kit.run(collectives.broadcast, 0, world_size=2)", cell=1)
    document.wait(NEW_PICTURE, arg="")
    assert document.page.locator("img.widget-image").is_visible()
    document.wait_until_it_shows(pictures=1, outputs=2, tables=0)
    assert document.dead_widgets() == []
    saved = [output["data"] for output in document.saved()["cells"][0]["outputs"]]
    still, controls = filter(None, saved)  # the live view leaves an empty one
    assert set(still) == {"image/png", "text/plain"}
    assert controls["text/plain"].startswith("Menus and sliders appear here")
